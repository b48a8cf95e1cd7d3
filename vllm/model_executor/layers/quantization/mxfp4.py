# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3's MXFP4 experts: to int4 when the user asks for it, and any dtype on the CPU platform.

Ledger
    What: with `--quantization-config.moe.weight int4_per_group_32`, `Mxfp4MoEMethod` refuses a
        layer that cannot be converted when it is constructed, chooses `CPUSituInt4Experts` on the
        CPU platform, keeps native sizes, and converts through `mxfp4_int4`, in place;
        `Mxfp4Config.get_quant_method` leaves layers of the ignore list in MXFP4. On the CPU
        platform `Mxfp4Config.get_supported_act_dtypes` also lists float32 and float16.
    Why: upstream converts in fifteen passes with twice the error or more, looks at AITER after all
        weights are loaded, converts ignored layers too, and ignores the flag in silence everywhere
        but on gfx942. It lists bfloat16 alone, though the torch experts compute in any dtype.
    How: wrap `Mxfp4MoEMethod.__init__`, `maybe_roundup_sizes` and `_setup_kernel_k3_situ_gfx942`,
        `Mxfp4Config.get_quant_method` and two functions of the module; replace one class method.
        Without the flag each wrapper hands over to upstream at once.
    Upstream: https://github.com/vllm-project/vllm/pull/51274 (the conversion),
        https://github.com/vllm-project/vllm/issues/52803 (the plan for gfx942); to file:
        [ROCm][Kimi-K3] MXFP4 to int4: less error, in place, refused before the load.
    Remove when: upstream converts with a scale no worse than `mxfp4_int4`'s "mse", refuses the flag
        where it cannot honour it, and lists float32 on the CPU platform.
"""

import torch
from wrapt import patch_function_wrapper

from vllm.model_executor.layers.quantization.utils.k3_int4 import policy
from vllm.platforms import current_platform
from vllm_overlay import require

_logger = require(f"{__name__}:logger")
_config = require(f"{__name__}:Mxfp4Config")
require(f"{__name__}:Mxfp4Config.get_supported_act_dtypes", parameters=())
require(f"{__name__}:Mxfp4Config.get_quant_method", parameters=("self", "layer", "prefix"))
_routed_experts = require(f"{__name__}:RoutedExperts")
_cpu_backend = require(f"{__name__}:Mxfp4MoeBackend.CPU")
_method = require(f"{__name__}:Mxfp4MoEMethod")
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


def _current_config():
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _is_asked_for() -> bool:
    return policy.is_requested(_current_config()) and not policy.is_spared()


@patch_function_wrapper(__name__, "_moe_weight_override_is_int4")
def _unless_spared(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) and not policy.is_spared()


@patch_function_wrapper(__name__, "Mxfp4Config.get_quant_method")
def _spare_ignored(wrapped, instance, args, kwargs):
    def build(layer, prefix):
        if isinstance(layer, _routed_experts) and policy.is_ignored(_current_config(), prefix):
            with policy.spared():
                return wrapped(layer, prefix)
        return wrapped(layer, prefix)

    return build(*args, **kwargs)


@patch_function_wrapper(__name__, "select_deepseek_v4_mxfp4_moe_backend")
def _select_int4(wrapped, instance, args, kwargs):
    if current_platform.is_cpu() and _is_asked_for():
        from vllm.model_executor.layers.fused_moe.experts import cpu_situ_int4_moe

        return _cpu_backend, cpu_situ_int4_moe.CPUSituInt4Experts
    return wrapped(*args, **kwargs)


@patch_function_wrapper(__name__, "Mxfp4MoEMethod.__init__")
def _refuse_or_select(wrapped, instance, args, kwargs):
    if not _is_asked_for():
        return wrapped(*args, **kwargs)
    from vllm.model_executor.layers.quantization.utils.k3_int4 import aiter, report

    target = policy.find_target()
    if target is policy.Target.GFX942:
        aiter.check_entry_point()
    policy.check_layer(args[0] if args else kwargs["moe"], target)
    wrapped(*args, **kwargs)
    if target is policy.Target.CPU:
        _logger.warning_once(
            "Kimi-K3's MXFP4 experts are converted to int4 with groups of 32 while they load. This "
            "loses accuracy and was asked for by %s.",
            policy.FLAG,
        )
    # Upstream's own switch. From here on a CPU takes the way of gfx942.
    instance.is_k3_situ_int4_gfx942 = True
    config = _current_config()
    instance.int4_report = report.report_for(config.model_config, policy.scale_rule(config))
    instance.int4_report.awaited += 1
    return None


@patch_function_wrapper(__name__, "Mxfp4MoEMethod.maybe_roundup_sizes")
def _keep_native_sizes(wrapped, instance, args, kwargs):
    if instance.is_k3_situ_int4_gfx942:
        hidden, inner = super(_method, instance).maybe_roundup_sizes(*args, **kwargs)
        on_cpu = current_platform.is_cpu()
        native = policy.native_sizes(
            hidden, inner, policy.Target.CPU if on_cpu else policy.Target.GFX942
        )
        if native is not None:
            return native
    return wrapped(*args, **kwargs)


@patch_function_wrapper(__name__, "Mxfp4MoEMethod._setup_kernel_k3_situ_gfx942")
def _convert_in_place(wrapped, instance, args, kwargs):
    from vllm.model_executor.layers.quantization.utils.k3_int4 import aiter, load

    (layer,) = args or kwargs.values()
    report = instance.int4_report
    dtype = torch.uint8 if instance.mxfp4_backend == _cpu_backend else aiter.weight_dtype()
    record = load.convert_layer(layer, instance.moe, report.scale_rule, dtype)
    instance._build_moe_kernel(layer)
    report.record(layer.layer_name, record)


if current_platform.is_cpu():
    _upstream_dtypes = _config.get_supported_act_dtypes.__func__
    _cpu_dtypes = [torch.bfloat16, torch.float32, torch.float16]

    def _get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Activation dtypes of the torch experts; other checkpoint formats keep upstream's list."""
        return list(_cpu_dtypes) if cls is _config else _upstream_dtypes(cls)

    _config.get_supported_act_dtypes = classmethod(_get_supported_act_dtypes)
