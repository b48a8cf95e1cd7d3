# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 SiTU experts on the CPU platform.

Ledger
    What: `backend_to_kernel_cls` adds `CPUSituMxfp4Experts` to the CPU backend's list, at its end;
        `convert_weight_to_mxfp4_moe_kernel_format` leaves weights for it as they were loaded.
    Why: upstream's CPU kernel needs AMX and knows SiLU only, so Kimi-K3 finds no experts; the
        conversion repacks weights for that kernel.
    How: wrap two functions.
    Upstream: none yet.
    Remove when: one of upstream's CPU experts supports MXFP4 with `MoEActivation.SITU`.
"""

from wrapt import patch_function_wrapper

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


@patch_function_wrapper(__name__, "backend_to_kernel_cls")
def _with_situ(wrapped, instance, args, kwargs):
    (backend,) = args or kwargs.values()
    classes = wrapped(backend)
    if backend != _backends.CPU:
        return classes
    from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import CPUSituMxfp4Experts

    return [*classes, CPUSituMxfp4Experts]


@patch_function_wrapper(__name__, "convert_weight_to_mxfp4_moe_kernel_format")
def _leave_packed(wrapped, instance, args, kwargs):
    if kwargs.get("mxfp4_backend") == _backends.CPU and kwargs.get("activation") == _situ:
        loaded = (kwargs.get(name) for name in _WEIGHTS)
        return tuple(None if weight is None else weight.data for weight in loaded)
    return wrapped(*args, **kwargs)
