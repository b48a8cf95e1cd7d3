# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`vllm serve` on a full checkpoint, through the official openai client, alone and under load."""

import asyncio
import math
import re
import time
from dataclasses import dataclass

import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from k3_checkpoint.presets import PRESETS
from tests.models.kimi_k3.cpu.support.k3_reference import Reference
from tests.models.kimi_k3.cpu.support.k3_server import Server

CLIENTS = 20
SECONDS = 60
TOKENS = 24
# Two candidates this close may swap when the batch around a request changes how sums are ordered.
TIE = 1e-3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(checkpoint):
    """A full checkpoint: vision tower, MXFP4 experts."""
    return checkpoint(vision=PRESETS["tiny"].vision)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with Server(folder, log) as running:
        yield running


@pytest.fixture
def client(server):
    return OpenAI(base_url=server.url, api_key="none", max_retries=0)


@dataclass
class Choice:
    """One generated token: its id, its logprob, and the best two logprobs."""

    token: int
    logprob: float
    best: tuple[float, float]


def choices(logprobs) -> list[Choice]:
    """Read the logprobs of a completion whose tokens are given as ids."""
    return [
        Choice(int(token.split(":")[1]), logprob, tuple(sorted(top.values(), reverse=True)[:2]))
        for token, logprob, top in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        )
    ]


def request(prompt: list[int], **more) -> dict:
    """Arguments of a greedy completion of token ids."""
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    fixed = {"model": "kimi-k3", "max_tokens": TOKENS, "temperature": 0.0, "logprobs": 2}
    return {"prompt": prompt, "extra_body": extra, **fixed, **more}


def prompts(count: int) -> list[list[int]]:
    """Random prompts of 1 to 120 tokens."""
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 121, (count,), generator=g).tolist()
    return [torch.randint(0, 500, (n,), generator=g).tolist() for n in lengths]


def test_the_overlay_is_in_every_process(server):
    """vLLM's own plugin loading brings it to the front end, the engine core and the workers, each
    of which says so once. That the model was found at all shows it in the registry's inspection."""
    lines = [line for line in server.log.read_text().splitlines() if " over vLLM " in line]
    processes = sorted(re.match(r"\((\w+)", line)[1].rstrip("-_0123456789") for line in lines)
    assert processes == ["APIServer", "EngineCore", "VllmWorker"], lines


def test_completion_equals_the_reference(client, folder):
    prompt = prompts(1)[0]
    answer = choices(client.completions.create(**request(prompt)).choices[0].logprobs)
    tokens = [c.token for c in answer]
    logits = Reference(folder).logits(prompt + tokens[:-1])[len(prompt) - 1 :]
    logprobs = logits.log_softmax(dim=-1)
    assert tokens == logprobs.argmax(dim=-1).tolist()
    for i, choice in enumerate(answer):
        assert abs(choice.logprob - logprobs[i, choice.token].item()) <= 1e-4


def test_streamed_text_equals_the_whole(client):
    fixed = {"model": "kimi-k3", "prompt": "hello world", "max_tokens": 30, "temperature": 0.0}
    whole = client.completions.create(**fixed).choices[0].text
    parts = [c.choices[0].text for c in client.completions.create(**fixed, stream=True)]
    assert len([p for p in parts if p]) > 5
    assert "".join(parts) == whole


def test_chat_streams_the_same_as_it_answers(client):
    messages = [{"role": "user", "content": "What are you?"}]
    fixed = {"model": "kimi-k3", "messages": messages, "max_tokens": 20, "temperature": 0.0}
    reply = client.chat.completions.create(**fixed)
    assert reply.usage.completion_tokens <= 20
    assert reply.usage.prompt_tokens > 10
    streamed = client.chat.completions.create(**fixed, stream=True)
    parts = [c.choices[0].delta.content or "" for c in streamed if c.choices]
    assert "".join(parts) == (reply.choices[0].message.content or "")


def same_until_a_tie(answer: list[Choice], solo: list[Choice]) -> bool:
    """Whether two greedy answers are equal, or part where both saw a tie."""
    for mine, theirs in zip(answer, solo, strict=True):
        if mine.token != theirs.token:
            return all(math.dist(c.best[:1], c.best[1:]) < TIE for c in (mine, theirs))
    return True


def test_twenty_streaming_clients_for_a_minute(server, client):
    """No error, and every answer is the one its prompt gets when it is alone."""
    asked = prompts(CLIENTS)
    solo = [choices(client.completions.create(**request(p)).choices[0].logprobs) for p in asked]
    answered = [0] * CLIENTS
    wrong: list[int] = []

    async def ask(own: AsyncOpenAI, n: int) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            answer: list[Choice] = []
            async for part in await own.completions.create(**request(asked[n], stream=True)):
                if part.choices and part.choices[0].logprobs:
                    answer += choices(part.choices[0].logprobs)
            answered[n] += 1
            if not same_until_a_tie(answer, solo[n]):
                wrong.append(n)

    async def all_clients() -> None:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as own:
            await asyncio.gather(*(ask(own, n) for n in range(CLIENTS)))

    asyncio.run(all_clients())
    assert not wrong, f"answers of prompts {sorted(set(wrong))} changed under load"
    assert min(answered) >= 2, answered
    print(f"{sum(answered)} answers of {TOKENS} tokens in {SECONDS} s")


def test_server_stops_cleanly(server):
    """Last of the module: no error while it served, exit code, and no process of the server left.

    Its log after the signal is vLLM's affair: the front end may read the end of its engine, which
    it has just asked for, as a failure and log that (EngineDeadError) before it is through.
    """
    served = server.log.read_text()
    server.stop()
    assert server.exit_code == 0, server.log.read_text()[-3000:]
    assert server.left_over == []
    assert "Traceback" not in served
    assert "Application shutdown complete." in server.log.read_text()
