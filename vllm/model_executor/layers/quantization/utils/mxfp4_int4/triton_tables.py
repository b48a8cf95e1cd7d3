# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The table of the fused kernel: new codes by map. Built from `definition`, kept on each device."""

from collections.abc import Callable
from functools import lru_cache

import torch

from .definition import (
    ABSMAX_FLOOR_BYTE,
    ABSMAX_SCALE_OFFSET,
    CANDIDATES,
    MAGNITUDES,
    absmax_code,
    candidate_code,
)

# Bytes at which some magnitude is under the 1e-6 floor of the "absmax" rule, and those beside them.
FLOOR_BYTES = range(100, 109)

# A row of the tables, int64: the new code of each magnitude, one a byte, for values above zero,
# then for values below; then "mse": the |code|s, one a byte; "absmax": by largest magnitude the
# last byte under the floor, and in the upper half the scale offset.


def _row(code: Callable[[int], int], layout: str) -> list[int]:
    """The first three columns for one map of value (half units) to code."""
    flip = 8 if layout == "pack_quantized" else 0
    above, below = (
        sum((code(sign * m) & 15 ^ flip) << 8 * i for i, m in enumerate(MAGNITUDES))
        for sign in (1, -1)
    )
    sizes = sum(max(abs(code(m)), abs(code(-m))) << 8 * i for i, m in enumerate(MAGNITUDES))
    return [above, below, sizes, 0]


@lru_cache(maxsize=16)
def tables(scale_rule: str, layout: str, device: torch.device) -> torch.Tensor:
    """int64 [maps, 4]. "mse": a map for each candidate. "absmax": for each largest magnitude, then
    for each byte under the floor."""
    if scale_rule == "mse":
        rows = [_row(lambda v, c=c: candidate_code(v, c), layout) for c in CANDIDATES]
    else:
        tops = [(m, 200) for m in MAGNITUDES]
        for byte in FLOOR_BYTES:
            under = zip(MAGNITUDES, ABSMAX_FLOOR_BYTE, strict=True)
            tops.append((max(m for m, last in under if byte <= last), byte))
        rows = [
            _row(lambda v, t=top, b=byte: absmax_code(v, t, b) if abs(v) <= t else 0, layout)
            for top, byte in tops
        ]
        for i, (floor, offset) in enumerate(
            zip(ABSMAX_FLOOR_BYTE, ABSMAX_SCALE_OFFSET, strict=True)
        ):
            rows[i][2] = floor + (offset << 32)
    return torch.tensor(rows, dtype=torch.int64).to(device)
