# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 experts to int4 with groups of 32, in one pass. Importing it imports nothing else: torch
comes with the first name that needs it, Triton with the first tensor on a GPU; never vLLM, AITER or
the command line. docs/conversion.md explains what is computed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .definition import GROUP_SIZE
from .errors import (
    ConversionDtypeError,
    ConversionError,
    ConversionInputError,
    ConversionInterruptedError,
    NativeCodeError,
)

if TYPE_CHECKING:
    from .convert import convert_experts
    from .dequant import ConvertedExperts, dequantize, dequantize_mxfp4
    from .stats import ConversionStats

__all__ = [
    "GROUP_SIZE",
    "ConversionDtypeError",
    "ConversionError",
    "ConversionInputError",
    "ConversionInterruptedError",
    "ConversionStats",
    "ConvertedExperts",
    "NativeCodeError",
    "convert_experts",
    "dequantize",
    "dequantize_mxfp4",
]

_MODULES = {
    "ConversionStats": "stats",
    "ConvertedExperts": "dequant",
    "convert_experts": "convert",
    "dequantize": "dequant",
    "dequantize_mxfp4": "dequant",
}


def __getattr__(name: str) -> Any:
    """The public names that need torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
