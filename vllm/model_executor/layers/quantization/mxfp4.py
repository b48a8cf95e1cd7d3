# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3's MXFP4 experts: to int4 when the user asks for it, and any dtype on the CPU platform.

Ledger
    What: with `--quantization-config.moe.weight int4_per_group_32`, or as the base of
        `PackedInt4MoEMethod`, `Mxfp4MoEMethod` refuses a layer that cannot be int4 when it is
        constructed, chooses `CPUSituInt4Experts` on the CPU platform, keeps whole pairs of groups,
        and converts or lays out experts through `mxfp4_int4`, in place;
        `Mxfp4Config.get_quant_method` leaves layers of the ignore list in MXFP4. On the CPU
        platform `Mxfp4Config.get_supported_act_dtypes` also lists float32 and float16.
    Why: upstream converts in fifteen passes with twice the error or more, looks at AITER after all
        weights are loaded, converts ignored layers too, and ignores the flag in silence everywhere
        but on gfx942. It lists bfloat16 alone, though the torch experts compute in any dtype.
    How: wrap `Mxfp4MoEMethod.__init__`, `maybe_roundup_sizes` and `_setup_kernel_k3_situ_gfx942`,
        `Mxfp4Config.get_quant_method` and two functions of the module; replace one class method.
        Where nobody asks for int4 each wrapper hands over to upstream at once.
    Upstream: https://github.com/vllm-project/vllm/pull/51274 (the conversion),
        https://github.com/vllm-project/vllm/issues/52803 (the plan for gfx942); to file:
        [ROCm][Kimi-K3] MXFP4 to int4: less error, in place, refused before the load.
    Remove when: upstream converts with a scale no worse than `mxfp4_int4`'s "mse", refuses the flag
        where it cannot honour it, and lists float32 on the CPU platform.
"""

from contextlib import nullcontext
from typing import Any

import torch
from wrapt import patch_function_wrapper

from vllm.model_executor.layers.quantization.utils.k3_int4 import facts, load, policy
from vllm.platforms import current_platform
from vllm_overlay import require

_config = require(f"{__name__}:Mxfp4Config")
require(f"{__name__}:Mxfp4Config.get_supported_act_dtypes", parameters=())
require(f"{__name__}:Mxfp4Config.get_quant_method", parameters=("self", "layer", "prefix"))
_routed_experts = require(f"{__name__}:RoutedExperts")
_cpu_backend = require(f"{__name__}:Mxfp4MoeBackend.CPU")
_aiter_backend = require(f"{__name__}:Mxfp4MoeBackend.AITER_MXFP4_BF16")
_experts_of = require(f"{__name__}:backend_to_kernel_cls", parameters=("backend",))
require(
    f"{__name__}:Mxfp4MoEMethod.__init__",
    parameters=("self", "moe", "activation_key"),
    uses=("_use_k3_situ_int4_gfx942", "select_deepseek_v4_mxfp4_moe_backend"),
)
require(f"{__name__}:_use_k3_situ_int4_gfx942", uses=("_moe_weight_override_is_int4",))
require(f"{__name__}:_moe_weight_override_is_int4", parameters=())
require(f"{__name__}:select_deepseek_v4_mxfp4_moe_backend", parameters=("config",))
require(
    f"{__name__}:Mxfp4MoEMethod.maybe_roundup_sizes",
    parameters=(
        "self",
        "hidden_size",
        "intermediate_size_per_partition",
        "act_dtype",
        "moe_parallel_config",
    ),
)
require(
    f"{__name__}:Mxfp4MoEMethod.process_weights_after_loading",
    parameters=("self", "layer"),
    uses=("is_k3_situ_int4_gfx942", "_setup_kernel_k3_situ_gfx942"),
)
require(f"{__name__}:Mxfp4MoEMethod._setup_kernel_k3_situ_gfx942", parameters=("self", "layer"))
require(f"{__name__}:Mxfp4MoEMethod._build_moe_kernel", parameters=("self", "layer"))
require("vllm.config:get_current_vllm_config_or_none", parameters=())


@patch_function_wrapper(__name__, "_moe_weight_override_is_int4")
def _by_flag(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) and facts.current_request() is policy.BY_FLAG


@patch_function_wrapper(__name__, "Mxfp4Config.get_quant_method")
def _spare_ignored(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    def build(layer: Any, prefix: str, *more: Any, **options: Any) -> Any:
        spare = isinstance(layer, _routed_experts) and facts.is_spared(prefix)
        with facts.building(None) if spare else nullcontext():
            return wrapped(layer, prefix, *more, **options)

    return build(*args, **kwargs)


@patch_function_wrapper(__name__, "select_deepseek_v4_mxfp4_moe_backend")
def _select_int4(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if facts.current_request() is None:
        return wrapped(*args, **kwargs)
    if not current_platform.is_cpu():
        return _aiter_backend, _experts_of(_aiter_backend)[0]
    from vllm.model_executor.layers.fused_moe.experts import cpu_situ_int4_moe

    return _cpu_backend, cpu_situ_int4_moe.CPUSituInt4Experts


@patch_function_wrapper(__name__, "Mxfp4MoEMethod.__init__")
def _refuse_or_select(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    asked = facts.current_request()
    if asked is None:
        return wrapped(*args, **kwargs)
    target = facts.check_layer(args[0] if args else kwargs["moe"], asked)
    wrapped(*args, **kwargs)
    # Upstream's own switch. From here on every target takes the way of gfx942.
    instance.is_k3_situ_int4_gfx942 = True
    load.prepare(instance, asked, target)
    return None


@patch_function_wrapper(__name__, "Mxfp4MoEMethod.maybe_roundup_sizes")
def _keep_group_pairs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    hidden, inner = wrapped(*args, **kwargs)
    if instance.is_k3_situ_int4_gfx942:
        inner = -(-inner // policy.GROUP_PAIR) * policy.GROUP_PAIR
    return hidden, inner


@patch_function_wrapper(__name__, "Mxfp4MoEMethod._setup_kernel_k3_situ_gfx942")
def _convert_in_place(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    load.set_up_kernel(instance, *args, on_cpu=instance.mxfp4_backend == _cpu_backend, **kwargs)


if current_platform.is_cpu():
    _upstream_dtypes = _config.get_supported_act_dtypes.__func__
    _cpu_dtypes = [torch.bfloat16, torch.float32, torch.float16]

    def _get_supported_act_dtypes(cls: Any) -> list[torch.dtype]:
        """Activation dtypes of the torch experts; other checkpoint formats keep upstream's list."""
        return list(_cpu_dtypes) if cls is _config else _upstream_dtypes(cls)

    _config.get_supported_act_dtypes = classmethod(_get_supported_act_dtypes)
