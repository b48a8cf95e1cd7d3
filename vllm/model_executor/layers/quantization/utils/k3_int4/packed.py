# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Packed int4 experts of a checkpoint on their way into AITER's layout: a change of places only.

`register` gives a layer parameters that the checkpoint's tensors are copied into, bytes as they
are. `repack_layer` then moves nibbles and scales, in their own memory. Nothing is rounded, and no
scale is chosen: those of the checkpoint are the result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mxfp4_int4.definition import GROUP_SIZE
from mxfp4_int4.layouts import place_scales
from vllm.model_executor.layers.quantization.utils.k3_int4.conversion_log import LayerRecord
from vllm.model_executor.layers.quantization.utils.k3_int4.parameters import (
    CHUNK_EXPERTS,
    PROJECTIONS,
    fill_padding,
    recorded,
    replace_experts,
)
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import (
    BY_CHECKPOINT,
    Int4RefusedError,
    Refusal,
)
from vllm.model_executor.utils import set_weight_attrs

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts

# compressed-tensors stores a code as code + 8, so that these eight nibbles are eight zeros.
ZERO_CODES = 0x88
# What the conversion's "mse" rule gives a group of zeros under the smallest scale of MXFP4. Values
# of padding are zero under any scale; with this one its bytes are the online conversion's, too.
PADDING_SCALE = 2.0**-128


class DamagedExpertsError(ValueError):
    """Tensors of packed experts are missing, damaged or of another model."""

    def __init__(self, place: str, expected: str, found: str) -> None:
        super().__init__(
            f"{place}: expected {expected}, found {found}. The checkpoint is incomplete or "
            "damaged: fetch or convert it again."
        )


def register(
    layer: "RoutedExperts",
    moe: "FusedMoEConfig",
    experts: int,
    hidden: int,
    inner: int,
    weight_loader: Callable[..., Any],
) -> None:
    """Give a layer the parameters of packed experts.

    `w13_weight` uint8 ``[E, 2 I, K/2]`` and `w2_weight` ``[E, K, I/2]`` hold the bytes of the
    checkpoint's int32 words, which is why shards of any whole number of groups fit;
    `*_weight_scale` bfloat16 ``[E, N, K/32]``; `*_weight_shape` int64 ``[E, 2]``.

    Args:
        layer: gets them.
        moe: tells over how many ranks the checkpoint's tensors are split.
        experts: on this rank.
        hidden: K of stage 1.
        inner: intermediate size on this rank, with padding.
        weight_loader: upstream's; it finds a rank's part of a tensor.
    """
    for name, rows, width in (("w13", moe.w13_num_shards * inner, hidden), ("w2", hidden, inner)):
        codes = torch.full((experts, rows, width // 2), ZERO_CODES, dtype=torch.uint8)
        # NaN tells a scale that never came.
        scale = torch.full((experts, rows, width // GROUP_SIZE), torch.nan, dtype=torch.bfloat16)
        shape = torch.zeros((experts, 2), dtype=torch.int64)
        for suffix, tensor, loader in (
            ("", codes, _loader(moe, weight_loader, torch.int32, GROUP_SIZE // 8)),
            ("_scale", scale, _loader(moe, weight_loader, torch.bfloat16, 1)),
            ("_shape", shape, weight_loader),
        ):
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(f"{name}_weight{suffix}", parameter)
            set_weight_attrs(parameter, {"weight_loader": loader})
        # How upstream's loader knows scales that are split as the weights are.
        set_weight_attrs(getattr(layer, f"{name}_weight_scale"), {"quant_method": "group"})
    # Gate and up write the same two numbers: a layerwise reload counts them twice.
    numel = moe.w13_num_shards * layer.w13_weight_shape.numel()
    set_weight_attrs(layer.w13_weight_shape, {"weight_loader_numel": numel})


def _loader(
    moe: "FusedMoEConfig", weight_loader: Callable[..., Any], dtype: torch.dtype, per_group: int
) -> Callable[..., Any]:
    """Upstream's loader for tensors of `dtype` that hold a group in `per_group` elements."""

    def load_packed(
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        _check_part(moe, loaded_weight, dtype, per_group, weight_name, shard_id, expert_id)
        part = loaded_weight.view(param.dtype)
        return weight_loader(
            param, part, weight_name, shard_id, expert_id, return_success=return_success
        )

    return load_packed


def _sizes(moe: "FusedMoEConfig") -> tuple[int, int]:
    """Hidden and intermediate size of the checkpoint's tensors, which no rank has split."""
    hidden, inner = moe.hidden_dim_unpadded, moe.intermediate_size_per_partition_unpadded
    # Upstream sets both when it makes the configuration.
    return hidden or 0, (inner or 0) * moe.moe_parallel_config.tp_size


def _check_part(
    moe: "FusedMoEConfig",
    tensor: torch.Tensor,
    dtype: torch.dtype,
    per_group: int,
    name: str,
    shard_id: str,
    expert: int,
) -> None:
    """Refuse a tensor of another dtype or size, and ranks that would share a group.

    Upstream's loader casts and cuts what it gets without a word.
    """
    ranks = moe.moe_parallel_config.tp_size
    hidden, inner = _sizes(moe)
    rows, width = (hidden, inner) if shard_id == "w2" else (inner, hidden)
    place = f"{name}, expert {expert}, {shard_id}"
    if tensor.dtype != dtype or tensor.dim() != 2:
        raise DamagedExpertsError(
            place, f"{dtype} of two dimensions", f"{tensor.dtype} {list(tensor.shape)}"
        )
    size = tensor.shape[0] if shard_id != "w2" else tensor.shape[1] * GROUP_SIZE // per_group
    if ranks > 1 and size % (ranks * GROUP_SIZE):
        refusal = Refusal(
            f"an intermediate size of {size} over {ranks} ranks ({place})",
            f"a multiple of {ranks} times {GROUP_SIZE}: a group of {GROUP_SIZE} values has one "
            "scale and cannot be split",
            "Use fewer tensor-parallel ranks or --enable-expert-parallel.",
        )
        raise Int4RefusedError(refusal, BY_CHECKPOINT)
    expected = [rows, width // GROUP_SIZE * per_group]
    if list(tensor.shape) != expected:
        raise DamagedExpertsError(place, str(expected), str(list(tensor.shape)))


def repack_layer(
    layer: "RoutedExperts", moe: "FusedMoEConfig", weight_dtype: torch.dtype
) -> LayerRecord:
    """Bring a layer's loaded experts into AITER's layout, in their own memory.

    Args:
        layer: With the parameters of `register`. Afterwards they are those that
            `load.convert_layer` leaves: weights in `weight_dtype`, marked ``is_shuffled``, and
            scales flat, in the order ``[E, G/2, N, 2]``.
        moe: Tells which part of the intermediate size is padding.
        weight_dtype: How the kernel calls packed int4; one byte an element.

    Returns:
        What the line at the end of the load is made of.

    Raises:
        DamagedExpertsError: Nothing has been changed then.
    """
    with recorded(layer) as record:
        # Kimi-K3's model has cleared padded weights to bytes of zero, which are codes of -8.
        fill_padding(layer, moe, ZERO_CODES, PADDING_SCALE)
        _check_loaded(layer, moe)
        replace_experts(layer, repack_in_place, weight_dtype)
    return record


def repack_in_place(
    weight: torch.Tensor, scale: torch.Tensor, chunk_experts: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change compressed-tensors' order into AITER's (see `mxfp4_int4.layouts` for both).

    Args:
        weight: uint8 ``[E, N, K/2]``, the bytes of int32 words; N a multiple of 16, K of 64.
        scale: bfloat16 ``[E, N, K/32]``.
        chunk_experts: so many experts are copied at a time, which bounds the extra memory: two
            copies of them. None: eight on a GPU; one on a CPU, where it stays in the cache.

    Returns:
        The same memory: uint8 ``[E, N, K/2]``, and the scales, flat.
    """
    chunk_experts = chunk_experts or (1 if weight.device.type == "cpu" else CHUNK_EXPERTS)
    with _whole_or_condemned(scale):
        for start in range(0, weight.shape[0], chunk_experts):
            chunk = slice(start, start + chunk_experts)
            moved = place_nibbles(weight[chunk])
            weight[chunk].copy_(moved)
            del moved
            placed = place_scales(scale[chunk].clone(), "aiter")
            scale[chunk].view(placed.shape).copy_(placed)
    return weight, scale.view(-1)


def place_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Nibbles of compressed-tensors, ``[E, N, K/2]`` uint8, where AITER's layout has them; a copy.

    Eight bytes are 16 values along K and stay together. Within them, each four bytes v0..v7 become
    v0|v4<<4, v1|v5<<4, v2|v6<<4, v3|v7<<4: two exchanges of neighbours.
    """
    experts, rows, half = packed.shape
    tiles = packed.view(torch.int64).view(experts, rows // 16, 16, half // 16, 2)
    moved = tiles.permute(0, 1, 3, 4, 2).clone(memory_format=torch.contiguous_format)
    words = moved.view(torch.int32)
    # From code + 8 to two's complement.
    words ^= -0x77777778
    swapped = torch.empty_like(words)
    for shift, kept in ((8, 0x0000FF00), (4, 0x00F000F0)):
        torch.bitwise_right_shift(words, shift, out=swapped)
        swapped ^= words
        swapped &= kept
        words ^= swapped
        swapped <<= shift
        words ^= swapped
    return words.view(torch.uint8).view(experts, rows, half)


@contextmanager
def _whole_or_condemned(scale: torch.Tensor) -> Iterator[None]:
    """Where the work stops half way, make the mixed bytes unusable."""
    try:
        yield
    except BaseException as error:
        scale.fill_(torch.nan)
        error.add_note("experts half way between two layouts: their scales were set to NaN")
        raise


def _check_loaded(layer: "RoutedExperts", moe: "FusedMoEConfig") -> None:
    """Refuse experts with tensors that never came or hold what no conversion writes."""
    hidden, inner = _sizes(moe)
    for name, size in zip(PROJECTIONS, ((inner, hidden), (hidden, inner)), strict=True):
        place = f"{layer.layer_name}.{name}"
        shapes = getattr(layer, f"{name}_weight_shape").data
        wrong = (shapes != shapes.new_tensor(size)).any(dim=1)
        # A load of invented weights (--load-format dummy) brings none at all.
        if wrong.any() and shapes.any():
            expert = int(wrong.nonzero()[0])
            raise DamagedExpertsError(
                f"{place}, expert {expert} on this rank",
                f"weight_shape {list(size)}",
                f"{shapes[expert].tolist()} ({int(wrong.sum())} such experts)",
            )
        scale = getattr(layer, f"{name}_weight_scale").data
        # Both ends are NaN if any scale is; a mask of all scales would take their memory again.
        if scale.numel() and not torch.stack(torch.aminmax(scale)).isfinite().all():
            expert, row, group = (~scale.isfinite()).nonzero()[0].tolist()
            raise DamagedExpertsError(
                f"{place}, expert {expert} on this rank, row {row}, group {group}",
                "a finite scale",
                "one that never came or is not a number",
            )
