# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""This machine, and GPUs that are only simulated, with each build of the stand-in for AITER."""

import sys

import pytest
import torch

from kimi_k3.doctor import machine
from kimi_k3.doctor.findings import Level
from kimi_k3.doctor.machine import Aiter, Kind, Machine, describe, writable
from tests import ROOT

SUPPORT = ROOT / "tests/models/kimi_k3/support"
GIB = 2**30


@pytest.fixture
def simulated(monkeypatch):
    """Let the doctor see a simulated GPU, with a build of AITER or none."""
    from tests.models.kimi_k3.support.simulated_gpu import simulated_gpu
    from vllm import _aiter_ops
    from vllm.platforms.cpu import CpuPlatform

    asking = (*simulated_gpu.ASKING, machine.__name__)
    monkeypatch.setattr(simulated_gpu, "ASKING", asking)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    memory = lambda index: ((250 - index) * GIB, 256 * GIB)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)

    def forget_aiter():
        for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
            del sys.modules[name]

    def choose(architecture: str, build: str | None = "new", enabled: bool = True) -> Machine:
        simulated_gpu.pretend(architecture, CpuPlatform, monkeypatch.setattr)
        rocm = simulated_gpu.rocm_module(architecture)
        monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", rocm)
        monkeypatch.setattr(_aiter_ops, "IS_AITER_FOUND", build is not None)
        monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "_AITER_ENABLED", enabled)
        monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "_FMOE_ENABLED", enabled)
        forget_aiter()
        if build is not None:
            monkeypatch.setenv("AITER_STAND_IN", build)
            monkeypatch.syspath_prepend(str(SUPPORT / "aiter_stand_in"))
        return machine.look()

    yield choose
    forget_aiter()


def levels(found: Machine) -> dict[str, Level]:
    return {row.subject: row.level for row in describe(found)}


def test_this_machine():
    found = machine.look()
    assert found.kind is Kind.CPU
    (memory,) = found.memory
    assert 0 < memory.free <= memory.total
    assert found.gpus == 0
    assert set(levels(found).values()) == {Level.OK}


def test_gfx942_with_an_aiter_that_can(simulated):
    found = simulated("gfx942")
    assert (found.kind, found.architecture, found.gpus) == (Kind.ROCM, "gfx942", 2)
    assert [memory.free // GIB for memory in found.memory] == [250, 249]
    assert found.aiter == Aiter("of unknown version", enabled=True, int4="", situ=True)
    assert levels(found)["AITER"] is Level.OK


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("without-act", "no keyword 'act'"),
        ("without-entry", "without that entry point"),
        ("without-situ", "no Situv2"),
    ],
)
def test_gfx942_with_an_aiter_that_cannot(simulated, build, reason):
    found = simulated("gfx942", build)
    assert reason in found.aiter.int4
    assert levels(found)["AITER"] is Level.WARNING


def test_aiter_switched_off(simulated):
    assert not simulated("gfx942", enabled=False).aiter.enabled


def test_no_aiter(simulated):
    found = simulated("gfx950", None)
    assert found.aiter == Aiter(None)
    assert levels(found)["AITER"] is Level.PROBLEM


def test_gfx950_is_not_asked_about_int4(simulated):
    assert simulated("gfx950", "without-entry").aiter.int4 == ""


def test_no_platform_and_no_gpu():
    assert levels(Machine(Kind.OTHER, "UnspecifiedPlatform")) == {"platform": Level.PROBLEM}
    assert levels(Machine(Kind.CUDA, "CudaPlatform", "sm_90"))["GPUs"] is Level.PROBLEM


def test_writable(tmp_path):
    assert writable(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not writable(tmp_path / "file" / "b")
