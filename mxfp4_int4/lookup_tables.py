# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The tables of `lookup`, by packed byte (two e2m1 codes). Built from `definition` once for each
device in milliseconds; small enough to stay in a core's first cache. Holds no logic of a run."""

from functools import lru_cache

import torch

from .definition import (
    ABSMAX_FLOOR_BYTE,
    CANDIDATES,
    MAGNITUDES,
    absmax_code,
    candidate_code,
    candidate_error,
)
from .naive import unpack_values

BYTES = 256
# Rows of a table for one map: every byte, and every byte once more for the first of a group.
ROWS = 2 * BYTES
WIDTH = 16  # columns of either kind in the sums; at least as many as candidates
KEY = 16  # keys are 16 * error + candidate number
NORM = 4096  # fits are sum(v*q) + 4096 * sum(q*q)
SIGNED = (*MAGNITUDES, *(-m for m in MAGNITUDES))  # by e2m1 code
_NEVER = -(2.0**22)

# The "absmax" code maps: by largest magnitude above the 1e-6 floor, then by byte under it.
FLOOR_BYTES = range(100, 109)


@lru_cache(maxsize=4)
def sum_table(device: torch.device) -> torch.Tensor:
    """float32 [512, 32], to be summed over the 16 bytes of a group.

    Columns 0..15: minus the key of each candidate. Columns 16..31: the fit of each candidate's
    codes, sum(v*q) and 4096 * sum(q*q) in one. Rows 256 on are for a group's first byte and add
    the candidate's number to the key. The sums that count are integers under 2^24, exact in
    float32: a key at its least is under 13 * 2^18 (test_definition), a fit under 2^24.
    """
    values = unpack_values(torch.arange(BYTES, device=device).to(torch.uint8)[:, None])
    table = torch.zeros(2, BYTES, 2 * WIDTH, dtype=torch.float32, device=device)
    table[..., len(CANDIDATES) : WIDTH] = _NEVER
    for index, c in enumerate(CANDIDATES):
        keys = [KEY * candidate_error(v, c) for v in range(-12, 13)]
        codes = [candidate_code(v, c) for v in range(-12, 13)]
        fits = [abs(v * q) + NORM * q * q for v, q in zip(range(-12, 13), codes, strict=True)]
        for column, by_value in ((index, [-key for key in keys]), (WIDTH + index, fits)):
            table[..., column] = torch.tensor(by_value, device=device)[values + 12].sum(-1)
        table[1, :, index] -= index
    return table.view(ROWS, 2 * WIDTH)


def _code_table(maps: list[dict[int, int]], layout: str, device: torch.device) -> torch.Tensor:
    """[maps * 512]: the two new codes of every byte under each map of value (half units) to code.

    "aiter": int16, one code in the low nibble of each byte; "pack_quantized": uint8, the nibbles
    in order, code + 8; "plain": int16, one int8 in each byte."""
    values = unpack_values(torch.arange(BYTES, device=device).to(torch.uint8)[:, None]) + 12
    tables = []
    for code in maps:
        by_value = torch.tensor([code.get(v, 0) for v in range(-12, 13)], device=device)
        first, second = by_value[values].unbind(-1)
        if layout == "pack_quantized":
            new = (first + 8) | (second + 8) << 4
        else:
            mask = 15 if layout == "aiter" else 255
            new = (first & mask) | (second & mask) << 8
        tables += [new, new]
    return torch.cat(tables).to(torch.uint8 if layout == "pack_quantized" else torch.int16)


def mse_maps() -> list[dict[int, int]]:
    """Value (half units) to code, by candidate."""
    return [{v: candidate_code(v, c) for v in SIGNED} for c in CANDIDATES]


def absmax_maps() -> list[dict[int, int]]:
    """Value to code, by largest magnitude, then by byte under the floor."""

    def code_map(largest: int, byte: int) -> dict[int, int]:
        return {v: absmax_code(v, largest, byte) for v in SIGNED if abs(v) <= largest}

    maps = [code_map(m, 200) for m in MAGNITUDES]
    for byte in FLOOR_BYTES:
        sizes = [m for m, top in zip(MAGNITUDES, ABSMAX_FLOOR_BYTE, strict=True) if byte <= top]
        maps.append(code_map(max(sizes), byte))
    return maps


@lru_cache(maxsize=12)
def mse_codes(layout: str, device: torch.device) -> torch.Tensor:
    """The codes of each candidate."""
    return _code_table(mse_maps(), layout, device)


@lru_cache(maxsize=12)
def absmax_codes(layout: str, device: torch.device) -> torch.Tensor:
    """The codes by largest magnitude, then by byte under the floor."""
    return _code_table(absmax_maps(), layout, device)
