# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What each variable does on each kind of machine, and that vLLM agrees about their meaning."""

import re
import subprocess
import sys

import pytest

from kimi_k3.doctor.environment import judge
from kimi_k3.doctor.findings import Level
from kimi_k3.doctor.machine import Kind, Machine, Memory
from vllm_overlay.tree import overlay_root

GIB = 2**30
CPU = Machine(Kind.CPU, "CpuPlatform", memory=(Memory("RAM", 64 * GIB, 32 * GIB),), cores=8)
ROCM = Machine(
    Kind.ROCM,
    "RocmPlatform",
    "gfx942",
    tuple(Memory(f"GPU {n}", 256 * GIB, 250 * GIB) for n in range(8)),
)
ON = {"VLLM_ROCM_USE_AITER": "1"}
OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM


def found(environ: dict[str, str], machine: Machine, ranks: int = 1) -> dict[str, Level]:
    return {row.subject: row.level for row in judge(environ, machine, ranks)}


@pytest.mark.parametrize(
    ("machine", "name", "value", "level"),
    [
        (CPU, "VLLM_KIMI_K3_OVERLAY", "1", OK),
        (CPU, "VLLM_KIMI_K3_OVERLAY", "", OK),
        (CPU, "VLLM_KIMI_K3_OVERLAY", "0", PROBLEM),
        (ROCM, "VLLM_KIMI_K3_OVERLAY", "0", WARNING),
        (CPU, "VLLM_KIMI_K3_OVERLAY", "off", PROBLEM),
        (CPU, "VLLM_PLUGINS", "other,kimi_k3", OK),
        (CPU, "VLLM_PLUGINS", "", PROBLEM),
        (ROCM, "VLLM_PLUGINS", "other", WARNING),
        (CPU, "VLLM_TARGET_DEVICE", "cpu", NOTE),
        (CPU, "VLLM_ROCM_USE_AITER", "1", NOTE),
        (ROCM, "VLLM_ROCM_USE_AITER", "True", OK),
        (ROCM, "VLLM_ROCM_USE_AITER", "yes", PROBLEM),
        (ROCM, "VLLM_ROCM_USE_AITER_MOE", "0", PROBLEM),
        (ROCM, "VLLM_ROCM_USE_AITER_MLA", "0", NOTE),
        (ROCM, "VLLM_ROCM_USE_AITER_MOE_SITUV2", "a8w4", NOTE),
        (ROCM, "VLLM_ROCM_USE_AITER_MOE_SITUV2", "a2w2", PROBLEM),
        (CPU, "VLLM_MLA_DISABLE", "1", PROBLEM),
        (CPU, "VLLM_MLA_DISABLE", "0", OK),
        (CPU, "VLLM_KIMI_K3_INT4_SCALE_RULE", "mse", OK),
        (CPU, "VLLM_KIMI_K3_INT4_SCALE_RULE", "absmax", WARNING),
        (CPU, "VLLM_KIMI_K3_INT4_SCALE_RULE", "best", PROBLEM),
        (CPU, "VLLM_KIMI_K3_NATIVE", "0", NOTE),
        (CPU, "VLLM_KIMI_K3_NATIVE", "1", NOTE),
        (CPU, "VLLM_KIMI_K3_NATIVE", "", OK),
        (CPU, "VLLM_KIMI_K3_NATIVE", "yes", PROBLEM),
        (CPU, "VLLM_KIMI_K3_LOAD_BUDGET_GIB", "1.5", OK),
        (CPU, "VLLM_KIMI_K3_LOAD_BUDGET_GIB", "0", NOTE),
        (CPU, "VLLM_KIMI_K3_LOAD_BUDGET_GIB", "", OK),
        (CPU, "VLLM_KIMI_K3_LOAD_BUDGET_GIB", "nan", PROBLEM),
        (CPU, "VLLM_KIMI_K3_LOAD_ACCOUNT", "", OK),
        (CPU, "VLLM_KIMI_K3_LOAD_BUDGET_GIB", "-1", PROBLEM),
        (CPU, "VLLM_KIMI_K3_LOAD_ACCOUNT", "/dev/null/nowhere", WARNING),
        (CPU, "VLLM_KIMI_K3_LOAD_ACCOUNT", "{tmp}/new/folder", OK),
        (CPU, "VLLM_CPU_KVCACHE_SPACE", "4", OK),
        (CPU, "VLLM_CPU_KVCACHE_SPACE", "", OK),
        (CPU, "VLLM_CPU_KVCACHE_SPACE", "40", PROBLEM),
        (CPU, "VLLM_CPU_KVCACHE_SPACE", "1.5", PROBLEM),
        (ROCM, "VLLM_CPU_KVCACHE_SPACE", "x", NOTE),
        (CPU, "VLLM_CPU_OMP_THREADS_BIND", "auto", OK),
        (CPU, "VLLM_CPU_OMP_THREADS_BIND", "nobind", OK),
        (CPU, "VLLM_CPU_OMP_THREADS_BIND", "0-3", OK),
        (CPU, "VLLM_CPU_OMP_THREADS_BIND", "0|1", PROBLEM),
        (CPU, "OMP_NUM_THREADS", "1", NOTE),
        (CPU, "OMP_NUM_THREADS", "many", WARNING),
        (CPU, "HIP_VISIBLE_DEVICES", "", NOTE),
        (ROCM, "HIP_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7", OK),
        (ROCM, "HIP_VISIBLE_DEVICES", "", PROBLEM),
        (ROCM, "CUDA_VISIBLE_DEVICES", "-1", PROBLEM),
        (CPU, "HF_HUB_OFFLINE", "1", OK),
        (CPU, "VLLM_USE_MODELSCOPE", "true", WARNING),
    ],
)
def test_each_variable(machine, name, value, level, tmp_path):
    environ = {name: value.format(tmp=tmp_path)}
    if machine is ROCM:
        environ = {**ON, **environ}
    assert found(environ, machine)[name] is level


def test_ranks_decide_about_cores_and_gpus():
    assert found({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, CPU, ranks=2) == {
        "VLLM_CPU_OMP_THREADS_BIND": OK
    }
    environ = {**ON, "HIP_VISIBLE_DEVICES": "0,1"}
    assert found(environ, ROCM, ranks=16)["HIP_VISIBLE_DEVICES"] is WARNING


def test_aiter_is_missed_where_it_is_needed():
    assert found({}, ROCM)["VLLM_ROCM_USE_AITER"] is PROBLEM
    assert found({}, CPU) == {"variables": OK}


def test_values_are_shown():
    (row,) = judge({"VLLM_PLUGINS": "a,b"}, CPU, 1)
    assert row.text.startswith("'a,b': the overlay stays out")


def test_names_are_still_vllms():
    """A name that vLLM no longer reads would make the doctor talk of nothing."""
    from vllm import envs

    ours = (
        "VLLM_PLUGINS",
        "VLLM_TARGET_DEVICE",
        "VLLM_ROCM_USE_AITER",
        "VLLM_ROCM_USE_AITER_MOE",
        "VLLM_ROCM_USE_AITER_MLA",
        "VLLM_ROCM_USE_AITER_LINEAR",
        "VLLM_ROCM_USE_AITER_RMSNORM",
        "VLLM_ROCM_USE_AITER_MOE_SITUV2",
        "VLLM_MLA_DISABLE",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_USE_MODELSCOPE",
    )
    assert [name for name in ours if name not in envs.environment_variables] == []


def test_every_variable_of_this_project_is_judged():
    """A new one must not be forgotten."""
    root = overlay_root()
    ours = {
        name
        for file in root.rglob("*.py")
        for name in re.findall(r"VLLM_KIMI_K3_[A-Z0-9_]+", file.read_text(encoding="utf-8"))
    }
    environ = dict.fromkeys(ours, "1")
    judged = {row.subject for row in judge(environ, CPU, 1)}
    assert judged == ours


def test_judging_imports_neither_torch_nor_the_engine():
    code = (
        "import sys; from kimi_k3 import cli\n"
        "sys.argv = ['kimi-k3', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "import kimi_k3.doctor.environment\n"
        "import kimi_k3.doctor.memory\n"
        "import kimi_k3.doctor.experts\n"
        "print('loaded', sorted({'torch', 'vllm.envs'} & sys.modules.keys()))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.splitlines()[-1] == "loaded []", process.stderr
