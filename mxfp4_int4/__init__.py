# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 experts to int4 with groups of 32, in one pass. Imports torch, and Triton where it is
used; never vLLM, AITER or the command line. docs/conversion.md explains what is computed."""

from .convert import convert_experts
from .dequant import ConvertedExperts, dequantize, dequantize_mxfp4
from .errors import (
    ConversionDtypeError,
    ConversionError,
    ConversionInputError,
    ConversionInterruptedError,
)
from .stats import ConversionStats

__all__ = [
    "ConversionDtypeError",
    "ConversionError",
    "ConversionInputError",
    "ConversionInterruptedError",
    "ConversionStats",
    "ConvertedExperts",
    "convert_experts",
    "dequantize",
    "dequantize_mxfp4",
]
