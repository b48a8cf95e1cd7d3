# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How a machine computes routed experts of a format, and which flag that takes; docs/int4.md.

Whether int4 experts can be used is asked of the engine's own policy, which imports vLLM.
"""

from dataclasses import dataclass
from typing import Any

import vllm_overlay
from k3_checkpoint.formats import Format
from kimi_k3.doctor.findings import Finding, Level
from kimi_k3.doctor.machine import Aiter, Kind, Machine

AREA = "experts"
SUBJECT = "kernel"


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
    """Say what computes SiTU experts of a format on a machine that vLLM runs on."""
    if found is Format.OTHER:
        return _no("expected MXFP4, int4 with groups of 32, or unquantized weights")
    if machine.kind is Kind.CPU:
        text = {
            Format.MXFP4: "torch experts; weights stay MXFP4 in memory",
            Format.INT4: "torch experts; weights stay int4 in memory",
            Format.MIXED: "torch experts; each layer's weights stay as they are in memory",
            Format.PLAIN: "torch experts, unquantized",
        }
        return _way(Level.OK, text[found])
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


def _on_rocm(machine: Machine, found: Format) -> Way:
    aiter = machine.aiter
    if aiter is None or aiter.version is None:
        return _no("needs AITER, which is not installed")
    if not aiter.enabled:
        return _no(
            "needs AITER's fused MoE, which is switched off or not for this GPU; what is left, "
            "emulation, takes four times the memory"
        )
    # Without int4 gfx942 has nothing for MXFP4, and elsewhere nobody asks for int4 in its place.
    if found in (Format.INT4, Format.MIXED) or (
        found is Format.MXFP4 and machine.architecture == "gfx942"
    ):
        return _int4(machine.architecture, aiter, found)
    if not aiter.situ:
        return _no("this AITER has no activation Situv2. Install one that has")
    if found is Format.MXFP4 and machine.architecture != "gfx950":
        return _way(
            Level.WARNING,
            f"vLLM takes AITER's SiTU kernel for MXFP4 on gfx950; on {machine.architecture} it is "
            "untried",
        )
    return _way(Level.OK, f"AITER's SiTU kernels, {found}")


def _int4(architecture: str, aiter: Aiter, found: Format) -> Way:
    """Ask the engine's policy about a ROCm GPU, as the engine itself will."""
    vllm_overlay.activate(amendments=False)
    from vllm.model_executor.layers.quantization.utils.k3_int4 import policy

    by_flag = found is Format.MXFP4
    usable = policy.Aiter(found=True, fused_moe=aiter.enabled, fault=aiter.int4)
    gpu = policy.Machine(policy.Platform.ROCM, architecture=architecture, aiter=usable)
    model = policy.Model(
        policy.ARCHITECTURES[0],
        "mxfp4" if by_flag else "compressed-tensors",
        None if by_flag else found,
    )
    asked = policy.BY_FLAG if by_flag else policy.BY_CHECKPOINT
    decision = policy.decide(policy.Facts(asked, gpu, model=model))
    if decision.refusals:
        reasons = (f"found {r.found}; needed: {r.needed}. {r.remedy}" for r in decision.refusals)
        return _no(f"int4 experts cannot be used: {' '.join(reasons)}")
    if decision.target is None:
        return _way(
            Level.WARNING,
            f"on {architecture} only vLLM's emulation takes int4 experts: it expands them "
            "to bfloat16, four times the memory. Serve the MXFP4 checkpoint",
            expands=True,
        )
    if not by_flag:
        return _way(Level.OK, "AITER's packed-int4 kernels")
    return _way(
        Level.WARNING,
        "gfx942 has no MXFP4 instructions: experts become int4 while they load, which loses "
        f"accuracy, and only with {policy.FLAG}",
        arguments=tuple(policy.FLAG.split()),
        converts=True,
    )
