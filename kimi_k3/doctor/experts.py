# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How a machine computes routed experts of a format, and which flag that takes; docs/int4.md.

Judges records; imports neither torch nor vLLM.
"""

from dataclasses import dataclass
from typing import Any

from k3_checkpoint.formats import Format as Format
from kimi_k3.doctor.findings import Finding, Level
from kimi_k3.doctor.machine import Kind, Machine

AREA = "experts"
SUBJECT = "kernel"
INT4_FLAG = "--quantization-config.moe.weight int4_per_group_32"


@dataclass(frozen=True)
class Way:
    """How experts will be computed.

    Attributes:
        finding: What will compute them, or why nothing will.
        arguments: What `vllm serve` needs for it.
        expands: Whether they become bfloat16, four times as large, while they load.
        converts: Whether they become int4 while they load.
    """

    finding: Finding
    arguments: tuple[str, ...] = ()
    expands: bool = False
    converts: bool = False


def way(machine: Machine, found: Format) -> Way:
    """Say what computes SiTU experts of a format on a machine."""
    if found is Format.OTHER:
        return _no("expected MXFP4, int4 with groups of 32, or unquantized weights")
    if machine.kind is Kind.CPU:
        return _on_cpu(found)
    if machine.kind is Kind.ROCM:
        return _on_rocm(machine, found)
    if machine.kind is Kind.CUDA:
        kernel = "Marlin experts" if found is Format.INT4 else "choice of a kernel"
        return _way(
            Level.NOTE,
            f"vLLM's own NVIDIA classes and {kernel}; nothing of this project is involved",
        )
    return _no(f"nothing computes Kimi-K3 on {machine.platform}")


def _way(level: Level, text: str, **more: Any) -> Way:
    return Way(Finding(AREA, SUBJECT, level, text), **more)


def _no(text: str) -> Way:
    return _way(Level.PROBLEM, text)


def _on_cpu(found: Format) -> Way:
    return _way(
        Level.OK,
        {
            Format.MXFP4: "torch experts; weights stay MXFP4 in memory",
            Format.INT4: "torch experts; weights stay int4 in memory",
            Format.MIXED: "torch experts; each layer's weights stay as they are in memory",
            Format.PLAIN: "torch experts, unquantized",
        }[found],
    )


def _on_rocm(machine: Machine, found: Format) -> Way:
    aiter = machine.aiter
    if aiter is None or aiter.version is None:
        return _no("needs AITER, which is not installed")
    if not aiter.enabled:
        return _no(
            "needs AITER's fused MoE, which is switched off or not for this GPU; what is left, "
            "emulation, takes four times the memory"
        )
    if machine.architecture == "gfx942" and found in (Format.MXFP4, Format.INT4):
        if aiter.int4:
            return _no(f"gfx942 computes them as int4 only, and this AITER cannot: {aiter.int4}")
        if found is Format.INT4:
            return _way(Level.OK, "AITER's packed-int4 kernels")
        return _way(
            Level.WARNING,
            "gfx942 has no MXFP4 instructions: experts become int4 while they load, which loses "
            f"accuracy, and only with {INT4_FLAG}",
            arguments=tuple(INT4_FLAG.split()),
            converts=True,
        )
    if machine.architecture == "gfx942" and found is Format.MIXED:
        return _no("gfx942 has no kernel for the layers that stayed in MXFP4; convert all of them")
    if found in (Format.INT4, Format.MIXED):
        return _way(
            Level.WARNING,
            f"on {machine.architecture} only vLLM's emulation takes int4 experts: it expands them "
            "to bfloat16, four times the memory. Serve the MXFP4 checkpoint",
            expands=True,
        )
    if not aiter.situ:
        return _no("this AITER has no activation Situv2. Install one that has")
    if found is Format.MXFP4 and machine.architecture != "gfx950":
        return _way(
            Level.WARNING,
            f"vLLM takes AITER's SiTU kernel for MXFP4 on gfx950; on {machine.architecture} it is "
            "untried",
        )
    return _way(Level.OK, f"AITER's SiTU kernels, {found}")
