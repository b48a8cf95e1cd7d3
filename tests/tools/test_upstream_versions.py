# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Tests of the ROCm amendments again, over the Python files of the next supported release."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Runs a kernel, and the kernels here are those of the older release.
NEEDS_KERNELS = "test_int8_projection"
SUITES = (
    "tests/models/kimi_k3/amd/test_kda.py",
    "tests/models/kimi_k3/amd/test_kda_alignment.py",
    "tests/models/kimi_k3/test_gfx942_int4.py",
    "tests/models/kimi_k3/test_gfx942_int4_scope.py",
    "tests/model_executor/layers/quantization/compressed_tensors",
    "tests/model_executor/layers/quantization/utils/k3_int4/test_packed.py",
)


@pytest.fixture(scope="module")
def newer_vllm() -> Path:
    target = ROOT / ".cache" / "vllm-0.33.0"
    command = [sys.executable, "tools/unpack_vllm.py", "0.33.0", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    return target


def run(arguments: list[str], vllm: Path) -> str:
    # An explicit CPU target, for this release's metadata names no CPU build.
    environment = {"PYTHONPATH": str(vllm), "VLLM_TARGET_DEVICE": "cpu"}
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.mark.network
@pytest.mark.slow
def test_rocm_amendments_on_the_next_release(newer_vllm):
    version = run(["-c", "import vllm; print(vllm.__version__)"], newer_vllm)
    assert version.split()[-1] == "0.33.0"
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"not {NEEDS_KERNELS}"]
    options += ["-m", "not slow"]
    output = run([*options, *SUITES], newer_vllm)
    collected = run([*options, "--collect-only", *SUITES], newer_vllm)
    count = sum("::" in line for line in collected.splitlines())
    assert count > 150
    assert f"{count} passed" in output
