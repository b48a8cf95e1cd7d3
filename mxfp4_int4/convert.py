# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`convert_experts`: checks everything, then hands slabs of experts to one implementation.

Owns buffers, storage and what happens when a conversion in place is interrupted. Chooses no scale
and packs no code: that is the implementations' work, and they all give the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from . import lookup, naive, native, native_library
from .blocks import scale_part, slabs
from .dequant import ConvertedExperts
from .errors import ConversionInterruptedError
from .inputs import (
    check_in_place,
    check_layout_fits,
    check_source,
    check_values,
)
from .layouts import is_aligned, scale_shape, weight_spec
from .options import Layout, ScaleRule, check_options
from .stats import ConversionStats, measure


@dataclass(frozen=True)
class Implementation:
    """One way to convert.

    convert(weight, scale, layout, scale_rule, out_weight, out_scale): uint8 [E, N, K/2] and
    [E, N, G] into buffers of `layouts.weight_spec` and, int16, of `layouts.scale_shape`.
    in_place(layout, groups): may the output be the bytes of `weight`?
    guard(scale): where there is one, an int32 [1] on the device that is not 0 if a byte needs a
    look, and a call that waits for its value. `convert(..., unless=...)` then writes nothing, so
    that it need not wait for an answer.
    """

    convert: Callable[..., None]
    in_place: Callable[[str, int], bool]
    largest_byte: Callable[[torch.Tensor], int]
    guard: Callable[[torch.Tensor], tuple[torch.Tensor, Callable[[], int]]] | None = None


NAIVE = Implementation(naive.convert_slab, lambda layout, groups: False, lookup.largest_byte)
LOOKUP = Implementation(lookup.convert_slab, lookup.converts_in_place, lookup.largest_byte)
NATIVE = Implementation(native.convert_slab, lookup.converts_in_place, native.largest_byte)

# Packed bytes that are worked on at a time where the whole cannot be: with statistics, and in place
# with an implementation that cannot write over its source.
SLAB_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}


def pick_implementation(device: torch.device) -> Implementation:
    """The fastest implementation for tensors on `device`."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from . import triton_kernel as fused

        return Implementation(
            fused.convert_slab, fused.converts_in_place, fused.largest_byte, fused.guard
        )
    if device.type == "cpu" and native_library.library() is not None:
        return NATIVE
    return LOOKUP


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
    On a GPU the call may return while the device still works, on the current stream.

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
    implementation: Implementation | None,
) -> ConvertedExperts:
    """`convert_experts` with a chosen implementation; None picks the fastest."""
    check_options(layout, scale_rule, chunk_experts, in_place)
    weight, scale, shape = check_source(weight, scale)
    check_layout_fits(layout, shape)
    if in_place:
        check_in_place(weight, scale, layout)
    work = implementation or pick_implementation(weight.device)
    size, dtype = weight_spec(layout, shape)
    if in_place and weight.numel():
        out_weight = weight.view(dtype)
    else:
        out_weight = torch.empty(size, dtype=dtype, device=weight.device)
    bits = torch.empty(scale_shape(layout, shape), dtype=torch.int16, device=weight.device)
    direct = not in_place or (is_aligned(weight) and work.in_place(layout, scale.shape[2]))

    stats = ConversionStats() if collect_stats else None
    buffers = out_weight, bits
    with torch.cuda.device(weight.get_device()):  # a kernel of Triton's runs on the current device
        if weight.numel() == 0:
            pass
        elif direct and not collect_stats:
            _convert_whole(weight, scale, layout, scale_rule, buffers, in_place, work)
        else:
            check_values(weight, scale, work.largest_byte)
            with _whole_or_condemned(scale, in_place):
                for experts, rows in slabs(shape, chunk_experts, SLAB_BYTES[weight.device.type]):
                    source, source_scale = weight[experts, rows], scale[experts, rows]
                    slab = (source.shape[0], source.shape[1], shape[2])
                    new = weight.new_empty(weight_spec(layout, slab)[0], dtype=dtype)
                    places = scale_part(bits, layout, experts, rows)
                    work.convert(source, source_scale, layout, scale_rule, new, places)
                    if stats is not None:
                        stats = stats.merge(measure(source, source_scale, layout, new, places))
                    out_weight[experts, rows].copy_(new)
    result = bits.view(torch.bfloat16)
    return ConvertedExperts(out_weight, result.view(-1) if layout == "aiter" else result, stats)


def _convert_whole(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    buffers: tuple[torch.Tensor, torch.Tensor],
    in_place: bool,
    work: Implementation,
) -> None:
    """All in one call. With a guard the device is given its work before the values are known to be
    sound, and the host waits for the guard alone."""
    held = 1
    if work.guard is not None:
        unless, wait = work.guard(scale)
        with _whole_or_condemned(scale, in_place):
            work.convert(weight, scale, layout, scale_rule, *buffers, unless=unless)
            held = wait()
    if held:
        check_values(weight, scale, work.largest_byte)
        with _whole_or_condemned(scale, in_place):
            work.convert(weight, scale, layout, scale_rule, *buffers)


@contextmanager
def _whole_or_condemned(scale: torch.Tensor, in_place: bool) -> Iterator[None]:
    """Where work in place stops half way, make the mixed bytes unusable and say so."""
    try:
        yield
    except BaseException as error:
        if not in_place:
            raise
        scale.fill_(255)
        message = (
            "in_place conversion was interrupted: the weight may hold a mixture of MXFP4 and int4 "
            "bytes; every byte of the scale tensor was set to 255 (NaN); load both tensors again"
        )
        if isinstance(error, Exception):
            raise ConversionInterruptedError(f"{message}. Cause: {error!r}") from error
        error.add_note(message)
        raise
