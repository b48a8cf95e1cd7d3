# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The tables of the fused kernel: new codes by map of values to codes. Kept in host memory, and
given to the device with each call, for the reason that `lookup_tables` states."""

from functools import cache

import torch

from .definition import (
    ABSMAX_FLOOR_BYTE,
    ABSMAX_SCALE_OFFSET,
    MAGNITUDES,
    absmax_maps,
    mse_maps,
)


def _row(codes: dict[int, int], layout: str) -> list[int]:
    flip = 8 if layout == "pack_quantized" else 0
    above, below = (
        sum((codes.get(sign * m, 0) & 15 ^ flip) << 8 * i for i, m in enumerate(MAGNITUDES))
        for sign in (1, -1)
    )
    pairs = [(codes.get(m, 0), codes.get(-m, 0)) for m in MAGNITUDES]
    sizes = sum(max(map(abs, pair)) << 8 * i for i, pair in enumerate(pairs))
    return [above, below, sizes, 0]


@cache
def tables(scale_rule: str, layout: str) -> torch.Tensor:
    """int64 [maps, 4], maps as `lookup_tables` orders them.

    Columns: the new code of each magnitude, one a byte, for values above zero; for values below;
    "mse": the |code|s, one a byte; "absmax": by largest magnitude the last byte under the floor,
    and in the upper half the scale offset."""
    maps = mse_maps() if scale_rule == "mse" else absmax_maps()
    rows = [_row(codes, layout) for codes in maps]
    if scale_rule == "absmax":
        for row, floor, offset in zip(rows, ABSMAX_FLOOR_BYTE, ABSMAX_SCALE_OFFSET, strict=False):
            row[2] = floor + (offset << 32)
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
