# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the int4 amendments leave alone: stock vLLM beside the overlay, each in a process."""

import json
import os
import subprocess
import sys

import pytest

import vllm
from tests import ROOT

SCRIPT = "tests.models.kimi_k3.support.simulated_gpu.describe_methods"


def describe(**environment: str) -> dict:
    ended = subprocess.run(
        [sys.executable, "-m", SCRIPT],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stock() -> dict:
    return describe(VLLM_KIMI_K3_OVERLAY="0")


@pytest.fixture(scope="module")
def overlaid() -> dict:
    return describe()


def test_without_the_flag_methods_are_stock(stock, overlaid):
    """The same classes, kernels, sizes and parameters on every GPU, for Kimi-K3's SiTU, for SiLU
    and for gpt-oss; and the same refusals."""
    assert stock["without"] == overlaid["without"]
    built = {name for name, found in stock["without"].items() if isinstance(found, dict)}
    assert {"gfx950 situ tp8", "gfx950 silu tp1", "gfx942 gpt-oss tp8"} <= built
    assert stock["without"]["gfx950 situ tp8"]["fields"]["is_k3_situ_aiter"]
    assert len(stock["without"]) == 4 * 2 * 3


def test_with_the_flag_gfx942_works_on_every_release(stock, overlaid):
    """0.32 converts every expert and then refuses its own kernel; 0.33 does not."""
    assert overlaid["flagged"]["fields"]["is_k3_situ_int4_gfx942"]
    assert overlaid["flagged"]["parameters"]["w13_weight"][0] == [4, 768, 128]
    if vllm.__version__.startswith("0.32."):
        assert stock["flagged"].startswith("ValueError: AiterExperts does not support this MoE")
    else:
        assert overlaid["flagged"]["experts"] == stock["flagged"]["experts"]
