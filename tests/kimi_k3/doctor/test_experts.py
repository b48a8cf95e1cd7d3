# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which kernel computes which format where, for machines that are not here."""

import pytest

from k3_checkpoint.formats import Format
from kimi_k3.doctor.experts import way
from kimi_k3.doctor.findings import Level
from kimi_k3.doctor.machine import Aiter, Kind, Machine

READY = Aiter("0.1.9", enabled=True, situ=True)
CPU = Machine(Kind.CPU, "CpuPlatform")
CUDA = Machine(Kind.CUDA, "CudaPlatform", "sm_90")
OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM


def rocm(architecture: str, aiter: Aiter | None = READY) -> Machine:
    return Machine(Kind.ROCM, "RocmPlatform", architecture, aiter=aiter)


@pytest.mark.parametrize(
    ("machine", "stored", "level", "part"),
    [
        (CPU, Format.MXFP4, OK, "MXFP4 in memory"),
        (CPU, Format.INT4, OK, "int4 in memory"),
        (CPU, Format.PLAIN, OK, "unquantized"),
        (CPU, Format.MIXED, OK, "stay as they are"),
        (CPU, Format.OTHER, PROBLEM, "expected MXFP4"),
        (rocm("gfx942"), Format.MXFP4, WARNING, "become int4 while they load"),
        (rocm("gfx942"), Format.INT4, OK, "AITER's packed-int4 kernels"),
        (rocm("gfx942", Aiter("1", True, "no act", True)), Format.INT4, PROBLEM, "no act"),
        (rocm("gfx942", Aiter("1", False, "", True)), Format.INT4, PROBLEM, "switched off"),
        (rocm("gfx942", Aiter(None)), Format.MXFP4, PROBLEM, "not installed"),
        (rocm("gfx950"), Format.MXFP4, OK, "AITER's SiTU kernels, MXFP4"),
        (rocm("gfx942"), Format.MIXED, PROBLEM, "no kernel for SiTU with MXFP4"),
        (rocm("gfx950"), Format.INT4, WARNING, "four times the memory"),
        (rocm("gfx950"), Format.MIXED, WARNING, "four times the memory"),
        (rocm("gfx950", Aiter("1", True, "", False)), Format.MXFP4, PROBLEM, "Situv2"),
        (rocm("gfx1250"), Format.MXFP4, WARNING, "untried"),
        (CUDA, Format.MXFP4, NOTE, "NVIDIA classes"),
        (CUDA, Format.INT4, NOTE, "Marlin"),
        (Machine(Kind.OTHER, "X"), Format.MXFP4, PROBLEM, "nothing computes"),
    ],
)
def test_way(machine, stored, level, part):
    found = way(machine, stored)
    assert found.finding.level is level
    assert part in found.finding.text


def test_only_mxfp4_on_gfx942_needs_the_flag():
    from vllm.model_executor.layers.quantization.utils.k3_int4.policy import FLAG

    found = way(rocm("gfx942"), Format.MXFP4)
    assert found.converts
    assert " ".join(found.arguments) == FLAG
    assert way(rocm("gfx942"), Format.INT4).arguments == ()
    assert way(rocm("gfx950"), Format.INT4).expands
