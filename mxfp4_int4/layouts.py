# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Where codes and scales lie in each output layout, in plain torch, both ways.

`pack_codes` and `place_scales` are the definition; the fast implementations write the same bytes
without these steps. This module rounds nothing and chooses nothing.

- "aiter": the order that AITER's packed-int4 MoE kernels read. Of each 16 rows, first the group of
  32, then its half, then the row, then 16 values along K. Every run v0..v7 of 8 values becomes the
  bytes v0|v4<<4, v1|v5<<4, v2|v6<<4, v3|v7<<4. Scales lie as [E, G/2, N, 2].
- "pack_quantized": compressed-tensors' form. int32 words along K, value i at bit 4i as code + 8.
- "plain": one int8 code a value.
"""

import torch

from .options import LAYOUTS as LAYOUTS
from .options import SCALE_RULES as SCALE_RULES
from .options import Layout as Layout
from .options import ScaleRule as ScaleRule

AITER_ROWS = 16


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the implementations can read a tensor as words of up to 16 bytes."""
    return (
        tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and tensor.storage_offset() % 16 == 0
    )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it is strided or starts between words."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def weight_spec(layout: str, shape: tuple[int, int, int]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the converted weight of an expert tensor [E, N, K]."""
    e, n, k = shape
    if layout == "aiter":
        return (e, n, k // 2), torch.uint8
    if layout == "pack_quantized":
        return (e, n, k // 8), torch.int32
    return (e, n, k), torch.int8


def scale_shape(layout: str, shape: tuple[int, int, int]) -> tuple[int, ...]:
    """Shape of the scales as they are written: [E, G/2, N, 2] for "aiter", else [E, N, G].
    "aiter" hands them out flat."""
    e, n, k = shape
    return (e, k // 64, n, 2) if layout == "aiter" else (e, n, k // 32)


def pack_codes(codes: torch.Tensor, layout: str) -> torch.Tensor:
    """int8 codes [E, N, K] in -8..7 -> the weight of `layout` (see `weight_spec`)."""
    e, n, k = codes.shape
    if layout == "plain":
        return codes
    if layout == "pack_quantized":
        nibbles = (codes.int() + 8).view(e, n, k // 8, 8)
        words = nibbles[..., 0].clone()
        for i in range(1, 8):
            words |= nibbles[..., i] << (4 * i)
        return words
    tiles = codes.reshape(e, n // 16, 16, k // 32, 2, 16).permute(0, 1, 3, 4, 2, 5)
    runs = (tiles & 15).to(torch.uint8).reshape(-1, 2, 4)
    return (runs[:, 0] | (runs[:, 1] << 4)).reshape(e, n, k // 2)


def unpack_codes(weight: torch.Tensor, layout: str, shape: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `pack_codes`: int8 codes [E, N, K]."""
    e, n, k = shape
    if layout == "plain":
        return weight
    if layout == "pack_quantized":
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
        return (((weight[..., None] >> shifts) & 15) - 8).to(torch.int8).reshape(e, n, k)
    runs = weight.reshape(-1, 1, 4)
    nibbles = torch.cat([runs & 15, runs >> 4], dim=1)
    codes = ((nibbles ^ 8).to(torch.int8) - 8).reshape(e, n // 16, k // 32, 2, 16, 16)
    return codes.permute(0, 1, 4, 2, 3, 5).reshape(e, n, k)


def place_scales(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Scales [E, N, G] -> their place in `layout` (see `scale_shape`)."""
    if layout != "aiter":
        return scales
    e, n, g = scales.shape
    return scales.view(e, n, g // 2, 2).permute(0, 2, 1, 3)


def gather_scales(scale: torch.Tensor, layout: str, shape: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `place_scales`, flat or not: [E, N, G]."""
    e, n, k = shape
    if layout != "aiter":
        return scale
    return scale.reshape(e, k // 64, n, 2).permute(0, 2, 1, 3).reshape(e, n, k // 32)
