# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Holds an engine's answers against the reference."""

from pathlib import Path

import torch

from tests.models.kimi_k3.cpu.support.k3_engine import Answer
from tests.models.kimi_k3.cpu.support.k3_reference import Reference

LENGTHS = (1, 63, 64, 65, 500)
# The bar of the project for float32. The engine and the reference add in different orders;
# differences seen are below 5e-5.
LOGPROB_TOLERANCE = 1e-4


def make_prompts(lengths=LENGTHS, seed=0) -> list[list[int]]:
    """Random prompts of the given lengths, of text tokens only."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 500, (n,), generator=generator).tolist() for n in lengths]


def compare(folder: Path, prompts: list[list[int]], answers: list[Answer]) -> None:
    """Hold every token and logprob of the answers against the reference.

    The reference reads prompt and answer at once: when each token is the reference's own choice
    after those before it, both have generated the same text.
    """
    reference = Reference(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference.logits(prompt + answer.tokens[:-1])[len(prompt) - 1 :]
        logprobs = logits.log_softmax(dim=-1)
        expected = logprobs.argmax(dim=-1).tolist()
        assert answer.tokens == expected, f"prompt of {len(prompt)} tokens"
        chosen = logprobs.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
        difference = (chosen - torch.tensor(answer.logprobs)).abs().max().item()
        assert difference <= LOGPROB_TOLERANCE, f"prompt of {len(prompt)} tokens"
