# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`vllm serve` with the int4 flag: answers over HTTP, and every refusal with its exit code.

GPUs are simulated: the server's processes are told so by `sitecustomize`, AITER is a stand-in.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import OpenAI

from k3_checkpoint.spec import ExpertFormat
from kimi_k3.convert.quantization import converted_config
from tests.models.kimi_k3.cpu.support.int4_reference import Int4Reference, hold
from tests.models.kimi_k3.cpu.support.k3_engine import Answer
from tests.models.kimi_k3.cpu.support.k3_server import Server, environment, free_port, serve_command

FLAG = ("--quantization-config.moe.weight", "int4_per_group_32")
REFUSED = "--quantization-config.moe.weight int4_per_group_32 is refused: found "
PACKED_REFUSED = "the checkpoint of packed int4 experts is refused: found "
SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 90

pytestmark = pytest.mark.slow


def test_answers_over_http(checkpoint, tmp_path):
    folder, log = checkpoint(), tmp_path / "log.txt"
    with Server(folder, log, *FLAG) as server:
        client = OpenAI(base_url=server.url, api_key="none", max_retries=0)
        reply = client.completions.create(
            model="kimi-k3",
            prompt=list(range(3, 70)),
            max_tokens=64,
            temperature=0.0,
            logprobs=1,
            extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
        )
    assert server.exit_code == 0
    logprobs = reply.choices[0].logprobs
    tokens = [int(token.split(":")[1]) for token in logprobs.tokens]
    assert len(tokens) == 64
    hold(Int4Reference(folder), [list(range(3, 70))], [Answer(tokens, logprobs.token_logprobs)])
    text = log.read_text()
    assert text.count("This loses accuracy and was asked for by") == 1
    assert text.count("int4 experts, rank 0: 4 layers with 64 experts converted") == 1


def gpu(architecture: str, aiter: str | None = None, **settings: str) -> dict[str, str]:
    """Settings of a server on a simulated GPU, with a build of the stand-in AITER or none."""
    folders = [SUPPORT / "simulated_gpu"] + ([SUPPORT / "aiter_stand_in"] if aiter else [])
    chosen = {"SIMULATED_GPU": architecture, "PYTHONPATH": ":".join(map(str, folders))}
    if aiter:
        chosen["AITER_STAND_IN"] = aiter
    return chosen | {"VLLM_ROCM_USE_AITER": "1"} | settings


def drop_beta(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"activation_situ_linear_beta": None}
    file.write_text(json.dumps(config))


def become_llama(folder: Path) -> None:
    """Another model's config.json; it is refused before weights are looked for."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 512,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def become_int4(folder: Path) -> None:
    """The config.json of a converted checkpoint; its weights are not looked for."""
    file = folder / "config.json"
    file.write_text(json.dumps(converted_config(json.loads(file.read_text()), (), ())))


@dataclass(frozen=True)
class Case:
    """One refusal: what the message says was found, what else it says, and how to get there."""

    found: str
    says: str
    settings: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = FLAG
    checkpoint: dict = field(default_factory=dict)
    spoil: Callable[[Path], None] = lambda folder: None
    refused: str = REFUSED


def spelled(**config) -> tuple[str, str]:
    moe = {"weight": "int4_per_group_32"} | config.pop("moe", {})
    return "--quantization-config", json.dumps({"moe": moe, **config})


CASES = {
    "NVIDIA": Case("the platform NVIDIA", "Start without the flag", gpu("cuda")),
    "gfx950": Case("the GPU gfx950", "gfx950 computes MXFP4 itself", gpu("gfx950", "new")),
    "no AITER": Case("no AITER in this environment", "flydsl_a16w4_gemm1", gpu("gfx942")),
    "AITER off": Case(
        "AITER's fused MoE switched off",
        "Set VLLM_ROCM_USE_AITER=1",
        gpu("gfx942", "new", VLLM_ROCM_USE_AITER="0"),
    ),
    "old AITER": Case(
        "AITER 0.0.stand-in without that entry point",
        "Install an AITER that has it",
        gpu("gfx942", "without-entry"),
    ),
    "AITER without act": Case(
        "AITER 0.0.stand-in, whose flydsl_a16w4_gemm1 has no keyword 'act'",
        "would compute SiLU in place of SiTU",
        gpu("gfx942", "without-act"),
    ),
    "no beta": Case("no activation_situ_linear_beta", "4.0 and 25.0", spoil=drop_beta),
    "tiles": Case("a (latent) hidden size of 96", "multiple of 64", checkpoint={"latent_size": 96}),
    "another model": Case("the model LlamaForCausalLM", "only model", spoil=become_llama),
    "bf16 experts": Case(
        "a checkpoint with unquantized weights",
        "nothing to convert",
        checkpoint={"expert_format": ExpertFormat.BF16},
    ),
    "int4 already": Case(
        "a checkpoint whose experts are int4 already",
        "the checkpoint is served as it is",
        spoil=become_int4,
    ),
    "int4 already, AITER without act": Case(
        "AITER 0.0.stand-in, whose flydsl_a16w4_gemm1 has no keyword 'act'",
        "serve the MXFP4 checkpoint that it was made from",
        gpu("gfx942", "without-act"),
        ("--dtype=bfloat16",),
        spoil=become_int4,
        refused=PACKED_REFUSED,
    ),
    "ignore list": Case(
        "an ignore list, ['model.layers.*'], that holds all 4 MoE layers",
        "at least one MoE layer",
        arguments=spelled(ignore=["model.layers.*"]),
    ),
    "activation": Case(
        "a moe.activation override",
        "Leave moe.activation out",
        arguments=spelled(moe={"activation": "mxfp8"}),
    ),
    "backend": Case(
        "--moe-backend emulation",
        "Leave --moe-backend out",
        arguments=(*FLAG, "--moe-backend=emulation"),
    ),
    "rule in the environment": Case(
        "VLLM_KIMI_K3_INT4_SCALE_RULE = 'best'",
        "one of mse, absmax",
        {"VLLM_KIMI_K3_INT4_SCALE_RULE": "best"},
    ),
    "two rules": Case(
        "additional_config['kimi_k3_int4_scale_rule'] = 'mse' but VLLM_KIMI_K3_INT4_SCALE_RULE",
        "Set one of the two",
        {"VLLM_KIMI_K3_INT4_SCALE_RULE": "absmax"},
        (*FLAG, "--additional-config", '{"kimi_k3_int4_scale_rule": "mse"}'),
    ),
}


@pytest.fixture(scope="module")
def ends(checkpoint, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and output of every case's server, two at a time."""

    def serve(name: str, folder: Path) -> tuple[int, str]:
        case = CASES[name]
        ended = subprocess.run(
            serve_command(folder, free_port(), *case.arguments),
            env=environment() | case.settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * SECONDS,
            check=False,
        )
        return ended.returncode, ended.stdout

    folders = []
    for case in CASES.values():
        folder = tmp_path_factory.mktemp("refused") / "checkpoint"
        shutil.copytree(checkpoint(**case.checkpoint), folder)
        case.spoil(folder)
        folders.append(folder)
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(serve, CASES, folders), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_refusals(ends, name):
    code, output = ends[name]
    case = CASES[name]
    assert f"{case.refused}{case.found}" in output, output[-5000:]
    assert "; needed: " in output
    assert case.says in output
    assert code not in (0, None)
    # Refused before a shard was opened.
    assert "Loading safetensors checkpoint shards" not in output
    assert "int4 experts, rank" not in output
