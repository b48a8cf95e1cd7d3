# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The parameters of one layer's experts: replaced, padded with zeros, and measured meanwhile.

What the conversion at load and the repacking of stored int4 have in common. Chooses nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from mxfp4_int4 import GROUP_SIZE, ConversionError
from vllm.model_executor.layers.quantization.utils.k3_int4 import conversion_log
from vllm.model_executor.layers.quantization.utils.k3_int4.conversion_log import LayerRecord
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts

# Upstream's own figure: it bounds what a conversion holds beside the weights.
CHUNK_EXPERTS = 8
PROJECTIONS = ("w13", "w2")


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
