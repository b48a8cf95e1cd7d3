# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the installed AITER can do with packed int4 experts. Asked on gfx942 only.

AITER is imported inside functions, and only once somebody has asked for int4 experts on a GPU that
it runs on. Everything here looks and refuses; nothing is computed with it.
"""

import importlib
import inspect

import torch

from vllm.model_executor.layers.quantization.utils.k3_int4.policy import (
    BY_FLAG,
    Int4RefusedError,
    Request,
)

ENTRY_MODULE = "aiter.ops.flydsl.kernels.moe_2stage_a16wmix"
ENTRY = "flydsl_a16w4_gemm1"
_NEEDED = f"AITER with the packed-int4 MoE entry point {ENTRY_MODULE}.{ENTRY}(..., act=...)"


def _remedy(asked: Request) -> str:
    return f"Install an AITER that has it, or {asked.fallback[0].lower()}{asked.fallback[1:]}."


def check_enabled(asked: Request = BY_FLAG) -> None:
    """Refuse a machine without AITER, or where vLLM is told not to use its fused MoE.

    Imports nothing of AITER: the API server asks, and must not touch the GPU.

    Raises:
        Int4RefusedError: see above.
    """
    from vllm import _aiter_ops

    if not _aiter_ops.is_aiter_found_and_supported():
        raise Int4RefusedError("no AITER in this environment", _NEEDED, _remedy(asked), asked)
    if not _aiter_ops.rocm_aiter_ops.is_fused_moe_enabled():
        raise Int4RefusedError(
            "AITER's fused MoE switched off",
            "it is the only kernel for int4 experts on gfx942",
            "Set VLLM_ROCM_USE_AITER=1 and VLLM_ROCM_USE_AITER_MOE=1.",
            asked,
        )


def check_entry_point(asked: Request = BY_FLAG) -> None:
    """Refuse an AITER that cannot compute SiTU with packed int4 weights. Imports AITER.

    Raises:
        Int4RefusedError: The entry point is missing, or does not know the keyword ``act``: such a
            build takes packed int4 weights and computes SiLU, whatever activation is asked for.
    """
    version = getattr(importlib.import_module("aiter"), "__version__", "of unknown version")
    try:
        entry = getattr(importlib.import_module(ENTRY_MODULE), ENTRY)
    except (ImportError, AttributeError) as error:
        raise Int4RefusedError(
            f"AITER {version} without that entry point ({error})",
            _NEEDED,
            _remedy(asked),
            asked,
        ) from error
    if "act" not in inspect.signature(entry).parameters:
        raise Int4RefusedError(
            f"AITER {version}, whose {ENTRY} has no keyword 'act' and would compute SiLU in place "
            "of SiTU",
            _NEEDED,
            _remedy(asked),
            asked,
        )
    from vllm._aiter_ops import rocm_aiter_ops

    if rocm_aiter_ops.get_aiter_activation_type("situ") is None:
        raise Int4RefusedError(
            f"AITER {version}, whose ActivationType has no Situv2",
            f"{_NEEDED} and the activation Situv2",
            _remedy(asked),
            asked,
        )


def weight_dtype() -> torch.dtype:
    """Return the dtype by which AITER tells packed int4 weights from MXFP4; a byte an element."""
    return importlib.import_module("aiter.dtypes").i4x2
