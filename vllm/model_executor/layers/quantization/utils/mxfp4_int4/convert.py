# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`convert_experts`: checks everything, then hands slabs of experts to one implementation.

Owns buffers, storage and what happens when a conversion in place is interrupted. Chooses no scale
and packs no code: that is the implementations' work, and they all give the same bits.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Protocol

import torch

from . import lookup
from .dequant import ConvertedExperts
from .errors import ConversionInterruptedError
from .inputs import (
    check_in_place,
    check_layout_fits,
    check_options,
    check_source,
    check_values,
)
from .layouts import AITER_ROWS, Layout, ScaleRule, gather_scales, scale_shape, weight_spec
from .stats import ConversionStats, measure


class ConvertSlab(Protocol):
    """Converts uint8 weight [E, N, K/2] and scale [E, N, G] into buffers of `layouts.weight_spec`
    and int16 `layouts.scale_shape`. The buffers never share memory with the source."""

    def __call__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        layout: str,
        scale_rule: str,
        out_weight: torch.Tensor,
        out_scale: torch.Tensor,
    ) -> None: ...


# Packed bytes that are worked on at a time where the whole cannot be: in place, or with stats.
# A slab of one expert is cut further, at multiples of 16 rows.
SLAB_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}


def pick_implementation(device: torch.device) -> ConvertSlab:
    """The fastest implementation for tensors on `device`."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from . import triton_kernel

        return triton_kernel.convert_slab
    return lookup.convert_slab


def _slabs(
    shape: tuple[int, int, int], chunk_experts: int, limit: int
) -> Iterator[tuple[slice, slice]]:
    """Expert and row ranges of at most `chunk_experts` experts and about `limit` packed bytes."""
    e, n, k = shape
    expert_bytes = n * k // 2
    if expert_bytes <= limit:
        step = min(chunk_experts, max(1, limit // max(1, expert_bytes)))
        for start in range(0, e, step):
            yield slice(start, min(e, start + step)), slice(0, n)
        return
    rows = max(AITER_ROWS, limit // (k // 2) // AITER_ROWS * AITER_ROWS)
    for expert in range(e):
        for start in range(0, n, rows):
            yield slice(expert, expert + 1), slice(start, min(n, start + rows))


def convert_experts(
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    layout: Layout,
    scale_rule: ScaleRule = "mse",
    chunk_experts: int = 8,
    in_place: bool = False,
    collect_stats: bool = False,
) -> ConvertedExperts:
    """Convert MXFP4 experts to signed int4 with one bf16 scale per group of 32 along K.

    weight: uint8 [E, N, K/2], two e2m1 codes a byte, the low nibble first
    scale: uint8 or float8_e8m0fnu [E, N, K/32], 2^(b-127)
    layout: "aiter" (N % 16 == 0 and K % 64 == 0), "pack_quantized" or "plain" (K % 32 == 0);
        `ConvertedExperts` gives the shapes, `layouts` the order
    scale_rule: "mse" keeps the squared error small (see docs/conversion.md); "absmax" is AITER's
        own rule bit for bit, with its collapse of groups much under 1e-6, for comparison
    chunk_experts: at most so many experts are in work at a time, in place or with statistics
    in_place: the int4 bytes take the storage of `weight`, which is no MXFP4 afterwards. Extra
        memory: the scales, and at most one chunk
    collect_stats: also compare the result with its source (slow; off on the way of a load)

    CPU and CUDA/ROCm tensors of any strides. Every implementation and device gives the same bits.

    Raises ConversionInputError (a ValueError; ConversionDtypeError is a TypeError too) before
    anything is written: wrong dtypes, shapes, options; scale byte 255; values of 2^128 and more,
    which bfloat16 cannot hold. Raises ConversionInterruptedError when a conversion in place fails
    half way (KeyboardInterrupt and the like pass through, with a note): `scale` is then all 255
    (NaN), so that the mixed bytes are refused here and yield NaN elsewhere.
    """
    return _convert(weight, scale, layout, scale_rule, chunk_experts, in_place, collect_stats, None)


def _convert(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    chunk_experts: int,
    in_place: bool,
    collect_stats: bool,
    implementation: ConvertSlab | None,
) -> ConvertedExperts:
    """`convert_experts` with a chosen implementation; None picks the fastest."""
    check_options(layout, scale_rule, chunk_experts, in_place)
    weight, scale, shape = check_source(weight, scale)
    check_layout_fits(layout, shape)
    if in_place:
        check_in_place(weight, scale, layout)
    check_values(weight, scale)
    convert = implementation or pick_implementation(weight.device)

    size, dtype = weight_spec(layout, shape)
    if in_place and weight.numel():
        out_weight = weight.view(dtype)
    else:
        out_weight = torch.empty(size, dtype=dtype, device=weight.device)
    bits = torch.empty(scale_shape(layout, shape), dtype=torch.int16, device=weight.device)
    stats = ConversionStats() if collect_stats else None

    if weight.numel() == 0:
        pass
    elif not in_place and not collect_stats:
        convert(weight, scale, layout, scale_rule, out_weight, bits)
    else:
        started = False
        limit = SLAB_BYTES[weight.device.type]
        try:
            for experts, rows in _slabs(shape, chunk_experts, limit):
                source, bytes_ = weight[experts, rows], scale[experts, rows]
                slab = (source.shape[0], source.shape[1], shape[2])
                target, part = out_weight[experts, rows], _scale_part(bits, layout, experts, rows)
                work = torch.empty(weight_spec(layout, slab)[0], dtype=dtype, device=weight.device)
                convert(source, bytes_, layout, scale_rule, work, part)
                if stats is not None:
                    slab_bits = (
                        gather_scales(part.reshape(-1), layout, slab) if layout == "aiter" else part
                    )
                    stats = stats.merge(measure(source, bytes_, layout, work, slab_bits))
                started = in_place
                target.copy_(work)
        except BaseException as error:
            if started:
                _condemn(scale, error)
            raise
    result = bits.view(torch.bfloat16)
    return ConvertedExperts(out_weight, result.view(-1) if layout == "aiter" else result, stats)


def _scale_part(bits: torch.Tensor, layout: str, experts: slice, rows: slice) -> torch.Tensor:
    return bits[experts, :, rows] if layout == "aiter" else bits[experts, rows]


def _condemn(scale: torch.Tensor, error: BaseException) -> None:
    """Make a half-converted tensor unusable and say so."""
    scale.fill_(255)
    message = (
        "in_place conversion was interrupted: the weight holds a mixture of MXFP4 and int4 bytes; "
        "every byte of the scale tensor was set to 255 (NaN); load both tensors again"
    )
    if isinstance(error, Exception):
        raise ConversionInterruptedError(f"{message}. Cause: {error!r}") from error
    error.add_note(message)
