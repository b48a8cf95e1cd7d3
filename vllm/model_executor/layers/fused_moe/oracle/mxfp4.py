# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 SiTU experts on the CPU platform.

Ledger
    What: `backend_to_kernel_cls` adds `CPUSituMxfp4Experts` to the CPU backend's list, at its end;
        `convert_weight_to_mxfp4_moe_kernel_format` leaves weights for it as they were loaded;
        `_MXFP4_SCHEME_CANDIDATES` holds int4 with groups of 32, at its end.
    Why: upstream's CPU kernel needs AMX and knows SiLU only, so Kimi-K3 finds no experts; the
        conversion repacks weights for that kernel. In 0.32 a kernel for experts that were converted
        to int4 while loading is refused, because int4 is not among the schemes it is asked for.
    How: wrap two functions, add an entry to a list.
    Upstream: https://github.com/vllm-project/vllm/pull/51274 (int4 among the schemes); to file:
        [CPU] SiTU activation in CPU experts, for Kimi-K3.
    Remove when: one of upstream's CPU experts supports MXFP4 with `MoEActivation.SITU`.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32
from vllm_overlay import require

_backends = require(f"{__name__}:Mxfp4MoeBackend")
require(f"{__name__}:Mxfp4MoeBackend.CPU")
_situ = require("vllm.model_executor.layers.fused_moe.activation:MoEActivation.SITU")
require(f"{__name__}:backend_to_kernel_cls", parameters=("backend",))
_WEIGHTS = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
require(
    f"{__name__}:convert_weight_to_mxfp4_moe_kernel_format",
    parameters=("mxfp4_backend", "layer", *_WEIGHTS, "activation"),
)
require(f"{__name__}:_mxfp4_quant_keys_for_experts", uses=("_MXFP4_SCHEME_CANDIDATES",))
_schemes = require(f"{__name__}:_MXFP4_SCHEME_CANDIDATES")

if (kInt4Static32, None) not in _schemes:
    _schemes.append((kInt4Static32, None))


@patch_function_wrapper(__name__, "backend_to_kernel_cls")
def _with_situ(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    classes = wrapped(*args, **kwargs)
    if (args[0] if args else kwargs["backend"]) != _backends.CPU:
        return classes
    from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import CPUSituMxfp4Experts

    return [*classes, CPUSituMxfp4Experts]


@patch_function_wrapper(__name__, "convert_weight_to_mxfp4_moe_kernel_format")
def _leave_packed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("mxfp4_backend") == _backends.CPU and kwargs.get("activation") == _situ:
        loaded = (kwargs.get(name) for name in _WEIGHTS)
        return tuple(None if weight is None else weight.data for weight in loaded)
    return wrapped(*args, **kwargs)
