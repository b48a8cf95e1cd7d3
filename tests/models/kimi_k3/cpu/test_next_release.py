# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The engine over the Python files of the next supported vLLM release, with this one's kernels."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm
from kimi_k3.convert import ConvertOptions, convert_checkpoint
from tests.models.kimi_k3.cpu.support.k3_compare import compare, make_prompts
from tests.models.kimi_k3.cpu.support.k3_engine import Job, run_jobs

ROOT = Path(__file__).parents[4]


@pytest.fixture
def next_release(tmp_path) -> Path:
    """A folder for PYTHONPATH: vLLM 0.33.0's Python files beside the installed compiled modules."""
    unpacked = ROOT / ".cache" / "vllm-0.33.0"
    command = [sys.executable, "tools/unpack_vllm.py", "0.33.0", str(unpacked)]
    subprocess.run(command, cwd=ROOT, check=True)
    folder = tmp_path / "vllm-0.33.0"
    shutil.copytree(unpacked, folder)
    for compiled in Path(vllm.__file__).parent.glob("*.so"):
        (folder / "vllm" / compiled.name).symlink_to(compiled)
    return folder


@pytest.mark.network
@pytest.mark.slow
def test_next_release_equals_reference(next_release, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(next_release))
    # This release's metadata names no CPU build.
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    folder, prompts = checkpoint(), make_prompts()[:1]
    flag = {"quantization_config": {"moe": {"weight": "int4_per_group_32"}}}
    convert_checkpoint(folder, tmp_path / "int4", ConvertOptions())
    answers, online, offline = run_jobs(
        [
            Job(str(folder), make_prompts()),
            Job(str(folder), prompts, flag),
            Job(str(tmp_path / "int4"), prompts),
        ],
        tmp_path / "jobs",
    )
    assert (tmp_path / "jobs" / "version.txt").read_text().startswith("0.33.0")
    compare(folder, make_prompts(), answers)
    assert offline == online
