# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the installed AITER can do with packed int4 experts. Asked on gfx942 only.

AITER is imported inside functions, and only once somebody has asked for int4 experts on a GPU that
it runs on. Everything here looks; `policy` judges, and nothing is computed with it.
"""

import importlib
import inspect
import os

import torch

from vllm.model_executor.layers.quantization.utils.k3_int4 import policy


def look(*, inside: bool) -> policy.Aiter:
    """Tell what vLLM can use of AITER.

    Args:
        inside: Import it, too, and look at its entry point. The API server must not: an import
            touches the GPU.
    """
    from vllm import _aiter_ops

    if not _aiter_ops.is_aiter_found_and_supported():
        return policy.Aiter(found=False)
    enabled = bool(_aiter_ops.rocm_aiter_ops.is_fused_moe_enabled())
    return policy.Aiter(True, enabled, entry_fault() if enabled and inside else "")


def entry_fault() -> str:
    """Return why this AITER cannot compute SiTU with packed int4 weights; empty if it can.

    A build whose entry point does not know the keyword ``act`` takes packed int4 weights and
    computes SiLU, whatever activation is asked for. Imports AITER.
    """
    version = getattr(importlib.import_module("aiter"), "__version__", "of unknown version")
    try:
        entry = getattr(importlib.import_module(policy.AITER_ENTRY_MODULE), policy.AITER_ENTRY)
    except (ImportError, AttributeError) as error:
        return f"AITER {version} without that entry point ({error})"
    if "act" not in inspect.signature(entry).parameters:
        return (
            f"AITER {version}, whose {policy.AITER_ENTRY} has no keyword 'act' and would compute "
            "SiLU in place of SiTU"
        )
    from vllm._aiter_ops import rocm_aiter_ops

    if rocm_aiter_ops.get_aiter_activation_type("situ") is None:
        return f"AITER {version}, whose ActivationType has no Situv2"
    return ""


def weight_dtype() -> torch.dtype:
    """Return the dtype by which AITER tells packed int4 weights from MXFP4; a byte an element."""
    dtype: torch.dtype = importlib.import_module("aiter.dtypes").i4x2
    return dtype


def keep_plain_activations() -> None:
    """As upstream does for these kernels: no bound above which AITER takes FP8 activations."""
    from vllm._aiter_ops import rocm_aiter_ops

    if rocm_aiter_ops.is_fused_moe_situv2_enabled():
        os.environ["AITER_BF16_FP8_MOE_BOUND"] = "0"
