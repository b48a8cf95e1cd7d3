# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The console script's way to the command line: nothing heavy before a command needs it."""

import resource
import subprocess
import sys

import pytest

RUN = """
import sys
from kimi_k3 import cli
from vllm_overlay import tree
{before}
sys.argv = ["kimi-k3", *{arguments!r}]
try:
    cli.main()
except SystemExit as stop:
    print("exit", stop.code)
{after}
"""
NOT_INSTALLED = "tree.upstream_root = lambda: None; sys.modules['vllm'] = None"


def run(*arguments: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN.format(arguments=arguments, before=before, after=after)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_runs_neither_torch_nor_vllm():
    after = "print(sorted({'torch', 'vllm.envs'} & sys.modules.keys()))"
    process = run("--help", after=after)
    assert process.stdout.splitlines()[-2:] == ["exit 0", "[]"]
    assert "status" in process.stdout


def test_help_is_quick():
    """CPU time, so that a busy machine matters little; the best of five."""
    command = [sys.executable, "-c", "from kimi_k3.cli import main; main()", "--help"]
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3


@pytest.mark.parametrize("use", ["import vllm.version", "import vllm; vllm.__version__"])
def test_vllm_runs_when_it_is_used(use):
    after = f"{use}\nimport vllm\nprint('torch' in sys.modules, vllm.__version__)"
    process = run("--help", after=after)
    running, version = process.stdout.split()[-2:]
    assert running == "True"
    assert version[0].isdigit()


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"]], ids=str)
def test_help_without_vllm(arguments):
    process = run(*arguments, before=NOT_INSTALLED)
    assert "Usage: kimi-k3" in process.stdout
    assert process.stdout.splitlines()[-1] == "exit 0"


def test_a_command_without_vllm_says_what_is_missing():
    process = run("status", before=NOT_INSTALLED)
    assert "exit error: no vLLM is installed in this environment" in process.stdout
    assert "install vLLM 0.32.x and 0.33.x" in process.stdout
    assert "Traceback" not in process.stderr


def test_a_command_without_torch_says_so(tmp_path):
    before = f"{NOT_INSTALLED}; sys.modules['torch'] = None"
    process = run("make-checkpoint", str(tmp_path / "checkpoint"), before=before)
    assert "exit error: this command needs torch" in process.stdout
    assert not (tmp_path / "checkpoint").exists()
