# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 doctor`, run as a user runs it on a machine without a GPU."""

import json

from kimi_k3.doctor.diagnose import has_command

SPACE = {"VLLM_CPU_KVCACHE_SPACE": "0"}


def test_a_model_that_can_be_served(kimi_k3, int4):
    process = kimi_k3("doctor", int4, **SPACE)
    assert process.returncode == 0, process.stdout
    verdict = process.stdout.splitlines()[-1]
    # A bare vllm-cpu has no package named vllm, which is worth a warning.
    assert verdict.startswith("ready: " if has_command() else "ready, with 1 warning: ")
    assert str(int4) in process.stdout.splitlines()[-2]
    for part in ("CPU (CpuPlatform)", "amended", "int4, 96 matrices", "VLLM_CPU_KVCACHE_SPACE"):
        assert part in process.stdout
    assert process.stderr == ""


def test_the_machine_alone_as_json(kimi_k3):
    process = kimi_k3("doctor", "--json")
    assert process.returncode == 0, process.stdout
    found = json.loads(process.stdout)
    assert found["ready"]
    assert found["verdict"].endswith(": this machine can serve Kimi-K3")
    assert {row["area"] for row in found["findings"]} == {"machine", "vLLM", "environment"}
    assert (found["model"], found["command"]) == (None, None)


def test_a_model_that_cannot(kimi_k3, mxfp4_copy):
    next(mxfp4_copy.glob("*.safetensors")).unlink()
    process = kimi_k3("doctor", mxfp4_copy, "--json", VLLM_KIMI_K3_OVERLAY="0")
    assert process.returncode == 1
    found = json.loads(process.stdout)
    assert found["ready"] is False
    problems = {row["subject"] for row in found["findings"] if row["level"] == "problem"}
    assert problems == {"VLLM_KIMI_K3_OVERLAY", "shards"}


def test_a_broken_switch_is_a_row(kimi_k3):
    process = kimi_k3("doctor", VLLM_KIMI_K3_OVERLAY="maybe")
    assert process.returncode == 1
    assert "expected 0 or 1" in process.stdout
    assert "Traceback" not in process.stdout + process.stderr


def test_wrong_usage(kimi_k3):
    process = kimi_k3("doctor", "/nowhere/k3")
    assert process.returncode == 2
    assert "expected a checkpoint's folder" in " ".join(process.stderr.replace("│", " ").split())
    assert kimi_k3("doctor", "--tp", "0").returncode == 2
