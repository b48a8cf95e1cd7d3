# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Looks at the machine: vLLM's platform, GPUs, memory, AITER. Judges only what it sees itself.

torch, vLLM and, on a ROCm GPU alone, AITER are imported inside functions.
"""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import vllm_overlay
from kimi_k3.doctor.findings import Finding, Level
from kimi_k3.units import size

AREA = "machine"


class Kind(StrEnum):
    """What vLLM will run on."""

    CPU = "CPU"
    ROCM = "ROCm"
    CUDA = "CUDA"
    OTHER = "other"


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU, or of the host for a CPU, in bytes as vLLM counts them."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Aiter:
    """What the installed AITER can do with Kimi-K3's experts.

    Attributes:
        version: Of the package; None if there is none.
        enabled: Whether vLLM will use its fused MoE.
        int4: Why it cannot compute SiTU with packed int4 weights; empty if it can.
        situ: Whether it knows the activation at all.
    """

    version: str | None
    enabled: bool = False
    int4: str = ""
    situ: bool = False


@dataclass(frozen=True)
class Machine:
    """What the other judgements stand on.

    Attributes:
        kind: What vLLM will run on.
        platform: Name of vLLM's platform class.
        architecture: Of the GPUs, such as ``gfx942`` or ``sm_90``; empty on a CPU.
        memory: One for each visible GPU, or one for a CPU's host.
        cores: CPU cores that this process may use.
        aiter: Only on ROCm.
    """

    kind: Kind
    platform: str
    architecture: str = ""
    memory: tuple[Memory, ...] = ()
    cores: int = 1
    aiter: Aiter | None = None

    @property
    def gpus(self) -> int:
        """Visible GPUs."""
        return 0 if self.kind is Kind.CPU else len(self.memory)


def look() -> Machine:
    """Look at the machine that this process runs on.

    Raises:
        Exception: Whatever vLLM's platform detection or the GPU's driver raises.
    """
    # For this project's own modules, whether or not the amendments are switched off.
    vllm_overlay.activate(amendments=False)
    from vllm.platforms import current_platform

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = type(current_platform).__name__
    if current_platform.is_cpu():
        return Machine(Kind.CPU, name, memory=(_host_memory(),), cores=cores or 1)
    if current_platform.is_rocm():
        from vllm.platforms import rocm

        architecture = str(getattr(rocm, "_GCN_ARCH", "")) or "unknown"
        return Machine(
            Kind.ROCM, name, architecture, _gpu_memory(), cores or 1, _aiter(architecture)
        )
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        architecture = f"sm_{capability.major}{capability.minor}" if capability else "unknown"
        return Machine(Kind.CUDA, name, architecture, _gpu_memory(), cores or 1)
    return Machine(Kind.OTHER, name, cores=cores or 1)


def _host_memory() -> Memory:
    """Return the host's memory as vLLM's CPU worker will see it."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    node = get_visible_memory_node()[0]
    found = get_memory_node_info(node)
    return Memory(f"RAM of node {node}", found.total_memory, found.available_memory)


def _gpu_memory() -> tuple[Memory, ...]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Memory(f"GPU {index}", total, free))
    return tuple(found)


def _aiter(architecture: str) -> Aiter:
    if importlib.util.find_spec("aiter") is None:
        return Aiter(None)
    version = "of unknown version"
    for distribution in ("amd-aiter", "aiter"):
        try:
            version = importlib.metadata.version(distribution)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    from vllm._aiter_ops import rocm_aiter_ops

    enabled = bool(rocm_aiter_ops.is_fused_moe_enabled())
    try:
        situ = rocm_aiter_ops.get_aiter_activation_type("situ") is not None
    except Exception:
        # An AITER that does not import; the check of its entry point says why.
        situ = False
    return Aiter(version, enabled, _int4_fault() if architecture == "gfx942" else "", situ)


def _int4_fault() -> str:
    """Return why AITER cannot compute int4 experts; empty if it can. Imports AITER."""
    from vllm.model_executor.layers.quantization.utils.k3_int4 import aiter

    try:
        return aiter.entry_fault()
    except Exception as error:
        return str(error)


def describe(machine: Machine) -> Iterator[Finding]:
    """Say what the machine is, and what is wrong with it whatever the model."""
    if machine.kind is Kind.OTHER:
        yield Finding(
            AREA,
            "platform",
            Level.PROBLEM,
            f"{machine.platform}: vLLM finds neither a GPU of AMD or NVIDIA nor its CPU build. "
            "Install a vLLM built for this machine, or look at the visible devices below",
        )
        return
    on = f"{machine.architecture} x {machine.gpus}" if machine.gpus else f"{machine.cores} cores"
    yield Finding(AREA, "platform", Level.OK, f"{machine.kind} ({machine.platform}), {on}")
    if machine.kind is not Kind.CPU and not machine.gpus:
        yield Finding(AREA, "GPUs", Level.PROBLEM, "none is visible to this process")
    for memory in machine.memory:
        yield Finding(
            AREA, memory.name, Level.OK, f"{size(memory.free)} free of {size(memory.total)}"
        )
    yield from _describe_aiter(machine)


def _describe_aiter(machine: Machine) -> Iterator[Finding]:
    found = machine.aiter
    if machine.kind is not Kind.ROCM:
        yield Finding(AREA, "AITER", Level.OK, f"not needed on {machine.kind}")
        return
    if found is None or found.version is None:
        yield Finding(
            AREA, "AITER", Level.PROBLEM, "not installed; Kimi-K3's experts have no other kernel"
        )
        return
    able = [f"version {found.version}" if found.version[0].isdigit() else found.version]
    able.append("knows SiTU" if found.situ else "does not know SiTU (no Situv2)")
    if machine.architecture == "gfx942":
        able.append(
            "no int4 experts with SiTU" if found.int4 else "computes int4 experts with SiTU"
        )
    level = Level.OK if found.situ and not found.int4 else Level.WARNING
    yield Finding(AREA, "AITER", level, ", ".join(able))


def writable(folder: Path) -> bool:
    """Tell whether files can be made in a folder, or the folder itself where it is not there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
