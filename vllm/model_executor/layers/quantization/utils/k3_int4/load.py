# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One layer's loaded experts become int4 in AITER's layout, in their own memory.

w13 first, then w2, and nothing of the first is left when the second begins. Chooses no kernel and
refuses nothing: `policy` has done that before there were weights.
"""

from typing import TYPE_CHECKING, Any

import torch

from mxfp4_int4 import ConversionStats, convert_experts
from mxfp4_int4.layouts import ScaleRule
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.utils.k3_int4 import (
    aiter,
    conversion_log,
    facts,
    packed,
    policy,
)
from vllm.model_executor.layers.quantization.utils.k3_int4.conversion_log import LayerRecord
from vllm.model_executor.layers.quantization.utils.k3_int4.parameters import (
    CHUNK_EXPERTS,
    fill_padding,
    recorded,
    replace_experts,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts

logger = init_logger(__name__)


def prepare(method: Any, asked: policy.Request, target: policy.Target | None) -> None:
    """Let a new `Mxfp4MoEMethod` know by which rule its layer is converted, and say so once."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    rule = facts.scale_rule(config) if asked is policy.BY_FLAG else None
    method.int4_log = conversion_log.log_of(config.model_config, rule)
    method.int4_log.awaited += 1
    if asked is policy.BY_CHECKPOINT:
        logger.info_once(
            "Kimi-K3's experts are packed int4 in the checkpoint; they are laid out for %s as they "
            "are, without a conversion.",
            method.experts_cls.__name__,
        )
        if target is policy.Target.GFX942:
            aiter.keep_plain_activations()
    elif target is policy.Target.CPU:
        # On gfx942 upstream has said it.
        logger.warning_once(
            "Kimi-K3's MXFP4 experts are converted to int4 with groups of 32 while they load. This "
            "loses accuracy and was asked for by %s.",
            policy.FLAG,
        )


def set_up_kernel(method: Any, layer: "RoutedExperts", *, on_cpu: bool) -> None:
    """Bring a layer's loaded experts into the kernel's form, build the kernel, and log it.

    Args:
        method: The layer's `Mxfp4MoEMethod`; its `int4_log` tells the scale rule, or that the
            checkpoint holds int4 already.
        layer: See `convert_layer` and `packed.repack_layer`.
        on_cpu: The kernel takes uint8 for packed int4; else it takes AITER's own dtype.
    """
    dtype = torch.uint8 if on_cpu else aiter.weight_dtype()
    rule = method.int4_log.scale_rule
    if rule is None:
        record = packed.repack_layer(layer, method.moe, dtype)
    else:
        record = convert_layer(layer, method.moe, rule, dtype)
    method._build_moe_kernel(layer)
    method.int4_log.record(layer.layer_name, record)


def convert_layer(
    layer: "RoutedExperts",
    moe: "FusedMoEConfig",
    scale_rule: ScaleRule,
    weight_dtype: torch.dtype,
) -> LayerRecord:
    """Replace a layer's MXFP4 parameters by int4 ones.

    Args:
        layer: With `w13_weight` uint8 ``[E, 2 I, K/2]``, `w13_weight_scale` uint8
            ``[E, 2 I, K/32]``, `w2_weight` ``[E, K, I/2]`` and `w2_weight_scale` ``[E, K, I/32]``.
            Afterwards the weights have the same shapes in `weight_dtype` and are marked
            ``is_shuffled``; the scales are bfloat16, flat, ordered ``[E, G/2, N, 2]``.
        moe: Tells which part of the intermediate size is padding.
        scale_rule: "mse" or "absmax".
        weight_dtype: How the kernel calls packed int4; one byte an element.

    Returns:
        What the line at the end of the load is made of.

    Raises:
        ConversionError: As `convert_experts`; the layer's name is in the notes.
    """

    def convert(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if conversion_log.measures():
            stats = _sample(layer.layer_name, weight, scale, scale_rule)
            record.stats = record.stats.merge(stats)
        converted = convert_experts(
            weight,
            scale,
            layout="aiter",
            scale_rule=scale_rule,
            chunk_experts=CHUNK_EXPERTS,
            in_place=True,
        )
        return converted.weight, converted.scale

    with recorded(layer) as record:
        fill_padding(layer, moe, 0, 0)
        replace_experts(layer, convert, weight_dtype)
        if layer.w13_weight.is_cuda:
            # The conversion may still be under way, and the time noted is to be its own.
            torch.accelerator.synchronize(layer.w13_weight.device)
            # e8m0 scales leave holes that no later scale fits.
            torch.accelerator.empty_cache()
    return record


def _sample(
    layer_name: str, weight: torch.Tensor, scale: torch.Tensor, scale_rule: ScaleRule
) -> ConversionStats:
    """Measure the conversion of one expert, another one in every layer, on a copy."""
    if not weight.shape[0]:
        return ConversionStats()
    expert = sum(layer_name.encode()) % weight.shape[0]
    one = slice(expert, expert + 1)
    _, _, stats = convert_experts(
        weight[one], scale[one], layout="aiter", scale_rule=scale_rule, collect_stats=True
    )
    return stats or ConversionStats()
