# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The pipelines parse, and every command, file and path that they name exists."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PIPELINES = sorted((ROOT / ".buildkite").glob("*.yaml"))
STEPS = [
    pytest.param(step, id=f"{file.stem}-{step['label']}")
    for file in PIPELINES
    for step in yaml.safe_load(file.read_text())["steps"]
]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_both_pipelines_are_there():
    assert {file.name for file in PIPELINES} == {"pipeline-cpu.yaml", "test-amd.yaml"}


@pytest.mark.parametrize("step", STEPS)
def test_commands_exist(step):
    assert step["commands"]
    for command in step["commands"]:
        program, *arguments = command.split()
        if program == "make":
            assert arguments
            assert set(arguments) <= TARGETS
        elif program == "bash":
            script, *tests = arguments
            assert (ROOT / script).is_file()
            subprocess.run(["bash", "-n", ROOT / script], check=True)
            assert tests
            for test in tests:
                assert (ROOT / test).exists(), test
        else:
            pytest.fail(f"expected make or bash, found {command!r}")


@pytest.mark.parametrize("step", STEPS)
def test_dependencies_exist(step):
    for path in step["source_file_dependencies"]:
        assert (ROOT / path).exists(), path


def test_amd_steps_cover_both_architectures():
    """In the form of vLLM's AMD pipeline: a pool of agents and the mirrors that select the step."""
    steps = yaml.safe_load((ROOT / ".buildkite/test-amd.yaml").read_text())["steps"]
    names: dict[str, set[str]] = {}
    for step in steps:
        pool, _ = step["agent_pool"].rsplit("_", 1)
        architecture = {"mi300": "gfx942", "mi355": "gfx950"}[pool]
        assert f"amd{architecture}nightly" in step["mirror_hardwares"]
        assert f"amd{pool}" in step["mirror_hardwares"]
        assert step["dind"] is False
        assert 0 < step["timeout_in_minutes"] <= 60
        names.setdefault(architecture, set()).add(step["label"].split(") ", 1)[1])
    assert names["gfx942"] == names["gfx950"]


def test_amd_script_explains_itself_elsewhere():
    """On a machine without ROCm it stops before it installs anything."""
    script = ROOT / ".buildkite/scripts/amd-tests.sh"
    process = subprocess.run(["bash", script], capture_output=True, text=True)
    assert process.returncode == 2
    assert "usage:" in process.stderr


def test_ci_calls_what_exists():
    script = (ROOT / ".ci/run").read_text()
    called = re.findall(r"^make ([a-z]+)", script, re.MULTILINE)
    assert called == ["env", "lint", "types", "docs", "test", "slow"]
    assert set(called) <= TARGETS
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)
