# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The tables of `lookup`, by packed byte (two e2m1 codes). Built from `definition` in milliseconds;
small enough to stay in a core's first cache.

Kept in host memory alone: a table that stayed on a GPU could lie in a memory pool that its owner
discards (vLLM's sleep mode), and whatever default device a caller sets must not reach them.
"""

from functools import cache

import torch

from .definition import (
    CANDIDATES,
    KEY,
    absmax_maps,
    candidate_code,
    candidate_error,
    mse_maps,
)
from .naive import unpack_values

BYTES = 256
# Rows of a table for one map: every byte, and every byte once more for the first of a group.
ROWS = 2 * BYTES
WIDTH = 16  # columns of either kind in the sums; at least as many as candidates
NORM = 4096  # fits are sum(v*q) + 4096 * sum(q*q)
_NEVER = -(2.0**22)


@cache
def sum_table() -> torch.Tensor:
    """float32 [512, 32], to be summed over the 16 bytes of a group.

    Columns 0..15: minus the key of each candidate. Columns 16..31: the fit of each candidate's
    codes, sum(v*q) and 4096 * sum(q*q) in one. Rows 256 on are for a group's first byte and add
    the candidate's number to the key. The sums that count are integers under 2^24, exact in
    float32: a key at its least is under 13 * 2^18 (test_definition), a fit under 2^24.
    """
    values = _values()
    table = torch.zeros(2, BYTES, 2 * WIDTH, dtype=torch.float32, device="cpu")
    table[..., len(CANDIDATES) : WIDTH] = _NEVER
    for index, c in enumerate(CANDIDATES):
        keys = [KEY * candidate_error(v, c) for v in range(-12, 13)]
        codes = [candidate_code(v, c) for v in range(-12, 13)]
        fits = [abs(v * q) + NORM * q * q for v, q in zip(range(-12, 13), codes, strict=True)]
        for column, by_value in ((index, [-key for key in keys]), (WIDTH + index, fits)):
            table[..., column] = torch.tensor(by_value, device="cpu")[values + 12].sum(-1)
        table[1, :, index] -= index
    return table.view(ROWS, 2 * WIDTH)


@cache
def code_table(scale_rule: str, layout: str) -> torch.Tensor:
    """[maps * 512]: the two new codes of every byte under each map of `definition`.

    "aiter": int16, one code in the low nibble of each byte; "pack_quantized": uint8, the nibbles
    in order, code + 8; "plain": int16, one int8 in each byte."""
    values, tables = _values() + 12, []
    for code in mse_maps() if scale_rule == "mse" else absmax_maps():
        by_value = torch.tensor([code.get(v, 0) for v in range(-12, 13)], device="cpu")
        first, second = by_value[values].unbind(-1)
        if layout == "pack_quantized":
            new = (first + 8) | (second + 8) << 4
        else:
            mask = 15 if layout == "aiter" else 255
            new = (first & mask) | (second & mask) << 8
        tables += [new, new]
    return torch.cat(tables).to(torch.uint8 if layout == "pack_quantized" else torch.int16)


def _values() -> torch.Tensor:
    """int64 [256, 2], half units: the values of every byte."""
    return unpack_values(torch.arange(BYTES, device="cpu").to(torch.uint8)[:, None])
