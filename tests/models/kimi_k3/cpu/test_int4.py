# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The real engine with the int4 flag against the reference with converted experts: one rank and
two, experts split and spread, both scale rules, an ignore list, a simulated gfx942, updates."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.spec import Stack
from k3_checkpoint.write import write_checkpoint
from kimi_k3.convert import ConvertOptions, convert_checkpoint
from tests.models.kimi_k3.cpu.support import k3_engine
from tests.models.kimi_k3.cpu.support.int4_reference import Int4Reference, agreement, hold
from tests.models.kimi_k3.cpu.support.int4_reload import PROMPT, TOKENS, reload_twice
from tests.models.kimi_k3.cpu.support.k3_engine import Job, run_jobs

FLAG = {"moe": {"weight": "int4_per_group_32"}}
LENGTHS = (1, 65, 200)
SUPPORT = Path(__file__).parents[1] / "support"
SUMMARY = re.compile(
    r"int4 experts, rank (\d+): (\d+) layers with (\d+) experts converted in [\d.]+ s "
    r"\([\d.]+ GB/s of MXFP4\), scale rule (\w+); relative squared error ([\d.]+)%, ([\d.]+)% of "
    r"groups exact \(one expert a layer measured, \d+ groups\); peak extra memory [\d.]+ MiB, new "
    r"scales included"
)
WARNING = "This loses accuracy and was asked for by"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    """The reference works on small matrices, where a thread that waits for a core costs most."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def with_log(monkeypatch, tmp_path):
    monkeypatch.setitem(k3_engine.ENVIRONMENT, "VLLM_LOGGING_LEVEL", "INFO")
    # Errors and peaks of memory are measured only for those who ask for an account.
    monkeypatch.setitem(k3_engine.ENVIRONMENT, "VLLM_KIMI_K3_LOAD_ACCOUNT", str(tmp_path))


def make_prompts(seed=3) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 500, (n,), generator=g).tolist() for n in LENGTHS]


PACKED = re.compile(
    r"int4 experts, rank (\d+): (\d+) layers with (\d+) experts laid out as the checkpoint holds "
    r"them in [\d.]+ s \([\d.]+ GB/s\), nothing converted; peak extra memory [\d.]+ MiB"
)


def converted(source: Path, tmp_path: Path, *exclude: str) -> str:
    """The offline conversion of a checkpoint."""
    target = tmp_path / f"{source.name}-int4"
    convert_checkpoint(source, target, ConvertOptions(exclude=exclude))
    return str(target)


def ignoring(*layers: str) -> dict:
    return {"quantization_config": FLAG | {"ignore": list(layers)}}


def test_one_rank(checkpoint, tmp_path):
    """The flag; the other scale rule; spared layers of a text and of a full checkpoint; no flag.
    And the same converted offline, whole and in part: token by token, bit by bit."""
    text, full = checkpoint(), checkpoint(vision=PRESETS["tiny"].vision)
    prompts = make_prompts()
    flag = {"quantization_config": FLAG}
    absmax = flag | {"additional_config": {"kimi_k3_int4_scale_rule": "absmax"}}
    name = "model.layers.2.block_sparse_moe.experts"
    packed = converted(text, tmp_path)
    mixed = converted(full, tmp_path, "*layers.2.*", "*layers.3.*")
    by_rule, by_absmax, spared, spared_by_pattern, unflagged, offline, in_part = run_jobs(
        [
            Job(str(text), prompts, flag),
            Job(str(text), prompts[:1], absmax),
            Job(str(text), prompts[:1], ignoring(name)),
            Job(str(full), prompts[:1], ignoring("language_model.*.2.*", "*.3.block*")),
            Job(str(text), prompts[:1]),
            Job(packed, prompts),
            Job(mixed, prompts[:1]),
        ],
        tmp_path,
        timeout=500,
    )
    assert offline == by_rule
    assert in_part == spared_by_pattern
    reference = Int4Reference(text)
    hold(reference, prompts, by_rule)
    hold(Int4Reference(text, "absmax"), prompts[:1], by_absmax)
    hold(Int4Reference(text, spared=(2,)), prompts[:1], spared)
    hold(Int4Reference(full, spared=(2, 3)), prompts[:1], spared_by_pattern)
    hold(Int4Reference(text, spared=tuple(range(9))), prompts[:1], unflagged)
    # The comparison tells one from the other: answers of MXFP4 experts part from the int4 ones.
    _, _, largest, _ = agreement(reference, prompts[0], unflagged[0])
    assert largest > 1e-3

    log = (tmp_path / "log.txt").read_text()
    lines = SUMMARY.findall(log)
    counts = [(rank, layers, experts, rule) for rank, layers, experts, rule, _, _ in lines]
    # Four MoE layers of 16 experts; one, then two of them spared; the others log nothing of this.
    assert counts == [
        ("0", "4", "64", "mse"),
        ("0", "4", "64", "absmax"),
        ("0", "3", "48", "mse"),
        ("0", "2", "32", "mse"),
    ]
    assert float(lines[0][4]) < 0.6 * float(lines[1][4])
    assert log.count(WARNING) == 1
    assert PACKED.findall(log) == [("0", "4", "64"), ("0", "2", "32")]


def test_two_ranks(checkpoint, tmp_path):
    """Tensor parallel (32 of 64 a rank, padded to a pair of groups), and expert parallel with the
    filter that skips other ranks' experts while reading. Tensor parallel again, from a checkpoint
    that was converted offline."""
    folder = checkpoint(expert_intermediate_size=64)
    prompts = make_prompts()[:2]
    alone = {"tensor_parallel_size": 2}
    double = alone | {"quantization_config": FLAG}
    spread = double | {"enable_expert_parallel": True, "enable_ep_weight_filter": True}
    jobs = [Job(str(folder), prompts, double), Job(str(folder), prompts, spread)]
    jobs.append(Job(converted(folder, tmp_path), prompts, alone))
    *answers, offline = run_jobs(jobs, tmp_path, timeout=500)
    assert offline == answers[0]
    reference = Int4Reference(folder)
    for each in answers:
        hold(reference, prompts, each)
    lines = SUMMARY.findall((tmp_path / "log.txt").read_text())
    counts = sorted((rank, layers, experts) for rank, layers, experts, *_ in lines)
    assert counts == [("0", "4", "32"), ("0", "4", "64"), ("1", "4", "32"), ("1", "4", "64")]
    log = (tmp_path / "log.txt").read_text()
    assert sorted(PACKED.findall(log)) == [("0", "4", "64"), ("1", "4", "64")]


def test_simulated_gfx942(checkpoint, tmp_path, monkeypatch):
    """From the flag to tokens through upstream's AITER experts and the stand-in's fused MoE.

    KDA layers alone, for MLA asks for AITER's own normalization, which the stand-in does not have.
    Then with the dtype of a real one, from the flag and from a converted checkpoint.
    """
    folder = checkpoint(stack=Stack.KDA, layers=3, expert_intermediate_size=384)
    paths = f"{SUPPORT / 'simulated_gpu'}:{SUPPORT / 'aiter_stand_in'}"
    others = ("FP8BMM", "FP4BMM", "MLA", "MHA", "LINEAR", "RMSNORM", "TRITON_ROPE", "TRITON_GEMM")
    settings = {
        "SIMULATED_GPU": "gfx942",
        "PYTHONPATH": paths,
        "VLLM_ROCM_USE_AITER": "1",
        **{f"VLLM_ROCM_USE_AITER_{name}": "0" for name in others},
    }
    for name, value in settings.items():
        monkeypatch.setitem(k3_engine.ENVIRONMENT, name, value)
    prompts = make_prompts()[:2]
    flag = {"quantization_config": FLAG}
    real = {"dtype": "bfloat16"}
    answers, online, offline = run_jobs(
        [
            Job(str(folder), prompts, flag),
            Job(str(folder), prompts, flag | real),
            Job(converted(folder, tmp_path), prompts, real),
        ],
        tmp_path,
    )
    hold(Int4Reference(folder), prompts, answers)
    assert offline == online
    log = (tmp_path / "log.txt").read_text()
    assert "Using AiterExperts" in log or "Using AiterMxfp4Experts" in log
    # Upstream's own warning; this project adds none to it.
    assert log.count("was explicitly enabled by") == 1
    assert WARNING not in log
    assert {line[:4] for line in SUMMARY.findall(log)} == {("0", "2", "32", "mse")}
    assert PACKED.findall(log) == [("0", "2", "32")]


def test_weights_are_updated_twice(checkpoint, tmp_path):
    """New weights, converted again, in the very places of the old; then back to the first."""
    first, second = checkpoint(), tmp_path / "second"
    write_checkpoint(second, replace(PRESETS["tiny"], vision=None), shards=2, seed=9)
    answers, places, log = reload_twice(first, second, tmp_path)
    for folder, answer in zip((first, second, first), answers, strict=True):
        hold(Int4Reference(folder), [PROMPT], [answer])
        assert len(answer.tokens) == TOKENS
    assert answers[0].tokens == answers[2].tokens != answers[1].tokens
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == 4 * 4
    assert [line[1] for line in SUMMARY.findall(log)] == ["4", "4", "4"]
