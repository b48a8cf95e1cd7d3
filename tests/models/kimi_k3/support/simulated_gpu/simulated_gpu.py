# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Lets the code that deals with experts believe that it runs on a GPU, while all else stays a CPU.

For tests of decisions, and of the gfx942 path over the stand-in for AITER. It answers the platform
queries of a few vLLM modules, told by who asks; no kernel and no memory of a GPU is imitated.
"""

import inspect
import sys
from types import FrameType, ModuleType
from unittest import mock

_LAYERS = "vllm.model_executor.layers"
ASKING = (
    "vllm._aiter_ops",
    f"{_LAYERS}.fused_moe.experts.rocm_aiter_moe",
    f"{_LAYERS}.fused_moe.oracle.mxfp4",
    f"{_LAYERS}.fused_moe.oracle.int_wna16",
    f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe",
    f"{_LAYERS}.quantization.mxfp4",
    f"{_LAYERS}.quantization.utils.k3_int4.facts",
)
ARCHITECTURES = ("gfx942", "gfx950", "gfx1250")


def rocm_module(architecture: str) -> ModuleType:
    """What vLLM's ROCm platform module says about a GPU; the real one asks the driver on import."""
    module = ModuleType("vllm.platforms.rocm")
    for known in (*ARCHITECTURES, "gfx90a"):
        setattr(module, f"on_{known}", lambda known=known: known == architecture)
    for other in ("gfx9", "mi3xx", "cdna"):
        setattr(module, f"on_{other}", lambda: architecture in ARCHITECTURES)
    for none in ("gfx1x", "gfx11", "gfx1100", "gfx1151", "gfx12x", "rdna", "rdna4"):
        setattr(module, f"on_{none}", lambda: False)
    module.get_cdna_version = lambda: {"gfx942": 3, "gfx950": 4, "gfx1250": 5}[architecture]
    module._GCN_ARCH = architecture
    return module


def install_rocm_module(architecture: str) -> None:
    """Let this process, to its end, import the stand-in where vLLM asks for its ROCm platform."""
    mock.patch.dict("sys.modules", {"vllm.platforms.rocm": rocm_module(architecture)}).start()


class Pretended:
    """A platform query that answers differently to functions of the modules in ASKING.

    While such a module is being imported, it hears the truth: what it sets up then is for all.
    """

    def __init__(self, real: object, answer: object, is_property: bool = False) -> None:
        self.real, self.answer, self.is_property = real, answer, is_property

    def __get__(self, instance, owner):
        if self.is_property:
            return self.answer if _asks_about_experts(sys._getframe(1)) else self.real
        return lambda: self.answer if _asks_about_experts(sys._getframe(1)) else self.real(instance)


def _asks_about_experts(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in ASKING and frame.f_code.co_name != "<module>"


def answers(architecture: str) -> dict[str, object]:
    """Platform queries and what a GPU of this architecture ("cuda" for NVIDIA's) answers."""
    is_rocm = architecture in ARCHITECTURES
    return {"is_cpu": False, "is_rocm": is_rocm, "is_cuda": not is_rocm}


def pretend(architecture: str, platform: type, set_attribute=setattr) -> None:
    """Let the CPU platform's class answer as a GPU of this architecture would.

    Args:
        architecture: one of ARCHITECTURES, or "cuda".
        platform: vLLM's class for the CPU platform.
        set_attribute: as `setattr`; pytest's, to have it undone.
    """
    for name, answer in answers(architecture).items():
        set_attribute(platform, name, Pretended(_real(platform, name), answer))
    name = f"{'AMD' if architecture in ARCHITECTURES else 'NVIDIA'} {architecture} (simulated)"
    real = _real(platform, "device_name")
    set_attribute(platform, "device_name", Pretended(real, name, is_property=True))


def _real(platform: type, name: str) -> object:
    """The platform's own answer, also where another GPU is simulated already."""
    found = inspect.getattr_static(platform, name)
    return found.real if isinstance(found, Pretended) else found
