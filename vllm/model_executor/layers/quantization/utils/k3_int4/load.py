# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One layer's loaded experts become int4 in AITER's layout, in their own memory.

w13 first, then w2, and nothing of the first is left when the second begins. Chooses no kernel and
refuses nothing: `policy` has done that before there were weights.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mxfp4_int4 import ConversionError, ConversionStats, convert_experts
from mxfp4_int4.definition import GROUP_SIZE
from mxfp4_int4.layouts import ScaleRule
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.utils.k3_int4 import (
    aiter,
    conversion_log,
    facts,
    policy,
)
from vllm.model_executor.layers.quantization.utils.k3_int4.conversion_log import LayerRecord
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts

logger = init_logger(__name__)

# Upstream's own figure: it bounds what a conversion holds beside the weights.
CHUNK_EXPERTS = 8
PROJECTIONS = ("w13", "w2")


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
    from vllm.model_executor.layers.quantization.utils.k3_int4 import packed

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


@contextmanager
def recorded(layer: "RoutedExperts") -> Iterator[LayerRecord]:
    """Note what is done to a layer within the context."""
    parts = [getattr(layer, f"{p}_weight{s}") for p in PROJECTIONS for s in ("", "_scale")]
    record = LayerRecord(parts[0].shape[0], source_bytes=sum(part.nbytes for part in parts))
    device = parts[0].device
    del parts
    started = time.perf_counter()
    with ExitStack() as stack:
        if conversion_log.measures():
            stack.enter_context(conversion_log.peak_memory(device, record))
        yield record
    record.seconds = time.perf_counter() - started


def replace_experts(
    layer: "RoutedExperts",
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    weight_dtype: torch.dtype,
) -> None:
    """Replace codes and scales of both projections by what `change` makes of them in place."""
    for name in PROJECTIONS:
        weight, scale = (getattr(layer, f"{name}_weight{suffix}") for suffix in ("", "_scale"))
        try:
            new_weight, new_scale = change(weight.data, scale.data)
        except ConversionError as error:
            error.add_note(f"in {layer.layer_name}.{name}_weight; experts counted on this rank")
            raise
        # Whoever else holds the old parameters must keep neither their memory alive nor new bytes
        # under the old format's name.
        for source in (weight, scale):
            source.data = torch.empty(0, dtype=source.dtype, device=source.device)
        new_weight = new_weight.view(weight_dtype)
        set_weight_attrs(new_weight, {"is_shuffled": True})
        replace_parameter(layer, f"{name}_weight", new_weight)
        replace_parameter(layer, f"{name}_weight_scale", new_scale)
        del weight, scale, source, new_weight, new_scale


def fill_padding(layer: "RoutedExperts", moe: "FusedMoEConfig", codes: int, scale: float) -> None:
    """Write zeros past the checkpoint's intermediate size: `codes` a byte, and `scale`.

    On the first load they may be there already. A reload materializes the parameters anew and
    loads only what a checkpoint holds; the rest is whatever was in memory.
    """
    inner = layer.w2_weight.shape[2] * 2
    real = moe.intermediate_size_per_partition_unpadded
    if real is None or real >= inner:
        return
    for suffix, per_element, zero in (("", 2, codes), ("_scale", GROUP_SIZE, scale)):
        w13, w2 = (getattr(layer, f"{name}_weight{suffix}").data for name in PROJECTIONS)
        w13.unflatten(1, (2, inner))[:, :, real:] = zero
        w2[:, :, real // per_element :] = zero


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
