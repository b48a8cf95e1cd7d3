# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One layer's loaded MXFP4 experts become int4 in AITER's layout, in their own memory.

w13 first, then w2, and nothing of the first is left when the second begins. Chooses no kernel and
refuses nothing: `policy` has done that before there were weights.
"""

import time
from typing import TYPE_CHECKING

import torch

from mxfp4_int4 import (
    ConversionError,
    ConversionStats,
    convert_experts,
)
from mxfp4_int4.layouts import ScaleRule
from vllm.model_executor.layers.quantization.utils.k3_int4.report import (
    LayerRecord,
    PeakMemory,
)
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts

# Upstream's own figure: it bounds what a conversion holds beside the weights.
CHUNK_EXPERTS = 8
PROJECTIONS = ("w13", "w2")


def convert_layer(
    layer: "RoutedExperts",
    moe: "FusedMoEConfig",
    scale_rule: ScaleRule,
    weight_dtype: torch.dtype,
) -> LayerRecord:
    """Replace a layer's MXFP4 parameters by int4 ones.

    Args:
        layer: with `w13_weight` uint8 ``[E, 2 I, K/2]``, `w13_weight_scale` uint8
            ``[E, 2 I, K/32]``, `w2_weight` ``[E, K, I/2]`` and `w2_weight_scale` ``[E, K, I/32]``.
            Afterwards the weights have the same shapes in `weight_dtype` and are marked
            ``is_shuffled``; the scales are bfloat16, flat, ordered ``[E, G/2, N, 2]``.
        moe: tells which part of the intermediate size is padding.
        scale_rule: "mse" or "absmax".
        weight_dtype: how the kernel calls packed int4; one byte an element.

    Returns:
        What the report at the end of the load is made of.

    Raises:
        ConversionError: As `convert_experts`; the layer's name is in the notes.
    """
    clear_padding(layer, moe)
    started = time.perf_counter()
    stats = ConversionStats()
    source_bytes = 0
    with PeakMemory(layer.w13_weight.device) as memory:
        for name in PROJECTIONS:
            weight = getattr(layer, f"{name}_weight")
            scale = getattr(layer, f"{name}_weight_scale")
            source_bytes += weight.nbytes + scale.nbytes
            try:
                stats = stats.merge(_sample(layer.layer_name, weight.data, scale.data, scale_rule))
                weight_data, scale_data, _ = convert_experts(
                    weight.data,
                    scale.data,
                    layout="aiter",
                    scale_rule=scale_rule,
                    chunk_experts=CHUNK_EXPERTS,
                    in_place=True,
                )
            except ConversionError as error:
                error.add_note(f"in {layer.layer_name}.{name}_weight; experts counted on this rank")
                raise
            # Whoever else holds the old parameters must keep neither their memory alive nor int4
            # bytes under the name of MXFP4.
            for source in (weight, scale):
                source.data = torch.empty(0, dtype=torch.uint8, device=source.device)
            weight_data = weight_data.view(weight_dtype)
            set_weight_attrs(weight_data, {"is_shuffled": True})
            replace_parameter(layer, f"{name}_weight", weight_data)
            replace_parameter(layer, f"{name}_weight_scale", scale_data)
            del weight, scale, source, weight_data, scale_data
        if layer.w13_weight.is_cuda:
            # The conversion may still be under way, and the time below is to be its own.
            torch.accelerator.synchronize(layer.w13_weight.device)
            # e8m0 scales leave holes that no later scale fits.
            torch.accelerator.empty_cache()
    return LayerRecord(
        experts=layer.w13_weight.shape[0],
        seconds=time.perf_counter() - started,
        source_bytes=source_bytes,
        peak_extra_bytes=memory.extra_bytes,
        stats=stats,
    )


def clear_padding(layer: "RoutedExperts", moe: "FusedMoEConfig") -> None:
    """Set what lies past the checkpoint's intermediate size to zero.

    On the first load it is zero already. A reload materializes the parameters anew and loads only
    what a checkpoint holds; the rest is whatever was in memory, and no MXFP4.
    """
    inner = layer.w2_weight.shape[2] * 2
    real = moe.intermediate_size_per_partition_unpadded
    if real is None or real >= inner:
        return
    for suffix, per_element in (("", 2), ("_scale", 32)):
        w13, w2 = (getattr(layer, f"{name}_weight{suffix}").data for name in PROJECTIONS)
        w13.unflatten(1, (2, inner))[:, :, real:] = 0
        w2[:, :, real // per_element :] = 0


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
