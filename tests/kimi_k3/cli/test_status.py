# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 status` and the console script around it, run as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_overlay.tree import compare_installed

KIMI_K3 = Path(sys.executable).with_name("kimi-k3")


def kimi_k3(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(KIMI_K3), *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def status() -> dict:
    process = kimi_k3("status", "--json")
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout)


def test_every_amendment_is_reported(status):
    rows = {row["module"]: row for row in status["amendments"]}
    assert rows.keys() == compare_installed().amendments.keys()
    assert all(row["outcome"] in ("amended", "stood down") for row in rows.values())
    kda = rows["vllm.models.kimi_k3.amd.kda"]
    assert kda["outcome"] == "amended"
    assert kda["why"].startswith("Online loading of Kimi-K3's merged KDA projection")


def test_versions_and_machine(status):
    import torch

    import vllm

    assert status["versions"]["vllm"] == vllm.__version__
    assert status["versions"]["torch"] == torch.__version__
    assert status["versions"].keys() == {"vllm-kimi-k3", "vllm", "torch", "triton", "aiter"}
    assert status["platform"] == "CpuPlatform"
    assert status["architecture"] == "no GPU"


def test_switched_off():
    process = kimi_k3("status", VLLM_KIMI_K3_OVERLAY="0")
    assert process.returncode == 0, process.stderr
    assert "VLLM_KIMI_K3_OVERLAY=0" in process.stdout
    assert "amended" not in process.stdout.replace("Amended modules", "")


def test_unknown_command_fails():
    process = kimi_k3("nonsense")
    assert process.returncode == 2
    assert "nonsense" in process.stderr
