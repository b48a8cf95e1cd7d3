# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The pipelines parse, and every command, file and path that they name exists."""

import ast
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
# Each package with those below it (pyproject.toml holds the direction).
BELOW = {
    "vllm_overlay": set(),
    "mxfp4_int4": set(),
    "k3_checkpoint": {"mxfp4_int4"},
    "vllm": {"vllm_overlay", "mxfp4_int4", "k3_checkpoint"},
    "kimi_k3": {"vllm_overlay", "mxfp4_int4", "k3_checkpoint", "vllm"},
}
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


def packages_of(tests: list[str]) -> set[str]:
    """The packages that these tests import, and those below them."""
    found = {"vllm_overlay"}  # the script runs `kimi-k3 status`
    for test in tests:
        path = ROOT / test
        for file in [path] if path.is_file() else path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                found |= {name.partition(".")[0] for name in names} & BELOW.keys()
    return found.union(*(BELOW[package] for package in found))


@pytest.mark.parametrize("step", STEPS)
def test_a_change_of_what_a_step_runs_starts_it(step):
    """Its tests, the packages they are of, how they are built, and the step itself."""
    dependencies = step["source_file_dependencies"]
    needed = {"pyproject.toml", "setup.py", ".buildkite/"}
    for command in step["commands"]:
        program, *arguments = command.split()
        tests = arguments[1:] if program == "bash" else []
        needed |= set(tests) | (packages_of(tests) if tests else BELOW.keys())
        needed |= {"Makefile", "tools/"} if program == "make" else set()
        needed |= {"tests/"} if arguments[-1] in ("test", "slow") else set()
    for path in needed:
        parts = f"{path.rstrip('/')}/"
        covered = any(
            parts.startswith(f"{entry.rstrip('/')}/") or entry.startswith(parts)
            for entry in dependencies
        )
        assert covered, f"{step['label']}: {path} is in no entry of {dependencies}"


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
