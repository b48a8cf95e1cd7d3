# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The conversion as one fused Triton kernel, for CUDA and ROCm (and Triton's interpreter).

Reads packed e2m1 and e8m0 bytes, chooses the scale and writes codes and scales in their final
layout; nothing in between goes through memory. Decides exactly as `naive` does, in integers.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .definition import (
    ABSMAX_FLOOR_BITS,
    ABSMAX_FLOOR_BYTE,
    ABSMAX_SCALE_OFFSET,
    CANDIDATES,
    MAGNITUDES,
    absmax_code,
    candidate_code,
    candidate_error,
)
from .triton_bits import aiter_word, code_planes, join_words, plain_words, popcount, to_planes

AITER, PACK_QUANTIZED, PLAIN = (tl.constexpr(i) for i in range(3))
_LAYOUT_CODES = {"aiter": 0, "pack_quantized": 1, "plain": 2}
ROWS = tl.constexpr(16)  # of an "aiter" block
TILE = 128  # groups a program: one a thread
WARPS = 4

# "absmax" code maps in the table: by largest magnitude, then by byte under the 1e-6 floor.
FLOOR_BYTES = range(100, 109)
_FIRST_FLOOR_BYTE = tl.constexpr(FLOOR_BYTES[0])
_FLOOR_MAPS = tl.constexpr(len(MAGNITUDES))
_LAST_FLOOR = tl.constexpr(len(FLOOR_BYTES) - 1)
_FLOOR_BITS = tl.constexpr(ABSMAX_FLOOR_BITS)


def _packed_sizes(sizes: list[int]) -> int:
    return sum(min(size, 15) << (4 * i) for i, size in enumerate(sizes))


@lru_cache(maxsize=16)
def _tables(scale_rule: str, device: torch.device) -> torch.Tensor:
    """int32: "mse" [16] |code| maps by candidate, 4 bits a magnitude. "absmax" [3, 32]: such maps
    by largest magnitude and floor byte, then floor bytes and scale offsets by largest magnitude."""
    if scale_rule == "mse":
        rows = [
            _packed_sizes([abs(candidate_code(-m * (1 if c > 0 else -1), c)) for m in MAGNITUDES])
            for c in CANDIDATES
        ]
        rows += [0] * (16 - len(rows))
    else:
        maps = [
            _packed_sizes([absmax_code(m, top, 200) if m <= top else 0 for m in MAGNITUDES])
            for top in MAGNITUDES
        ]
        for byte in FLOOR_BYTES:
            top = max(
                m for m, last in zip(MAGNITUDES, ABSMAX_FLOOR_BYTE, strict=True) if byte <= last
            )
            maps.append(
                _packed_sizes([absmax_code(m, top, byte) if m <= top else 0 for m in MAGNITUDES])
            )
        rows = [*maps, *([0] * (32 - len(maps)))]
        for column in (ABSMAX_FLOOR_BYTE, ABSMAX_SCALE_OFFSET):
            rows += [*column, *([0] * 24)]
    return torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32).to(device)


# Error of each candidate at 1, 2, 3, 4, 6, 8, -8, 12, -12 half units, times 16 so that candidate
# numbers fit below: the least key is the least error, the first of equals.
_VALUES = (1, 2, 3, 4, 6, 8, -8, 12, -12)
_KEYS = tl.constexpr(tuple(tuple(16 * candidate_error(v, c) for v in _VALUES) for c in CANDIDATES))
_CANDIDATES = tl.constexpr(len(CANDIDATES))
_NEGATIVE = tl.constexpr(sum((c < 0) << i for i, c in enumerate(CANDIDATES)))


@triton.jit
def _weigh(key, count, weight: tl.constexpr):
    """key + count * weight, and no operation where the weight is 0."""
    if weight == 0:
        return key
    return key + count * weight


@triton.jit
def _fit(fit, norm, count, sizes, index: tl.constexpr, value: tl.constexpr):
    """Add `count` codes of magnitude `value` to sum(v*q) and sum(q*q)."""
    code = ((sizes >> (4 * index)) & 15).to(tl.int32)
    part = count * code
    return fit + part * value, norm + part * code


@triton.jit
def _choose_mse(table, byte, s, m1, m2, m3, m4, m5, m6, m7):
    """-> |code| map, plane of the codes below zero, bf16 scale bits; planes as in triton_bits."""
    n1, n2, n3, n4 = popcount(m1), popcount(m2), popcount(m3), popcount(m4)
    n6, n8, n12 = popcount(m5), popcount(m6), popcount(m7)
    n8n, n12n = popcount(m6 & s), popcount(m7 & s)
    n8p, n12p = n8 - n8n, n12 - n12n
    best = tl.full(byte.shape, 0x7FFFFFFF, tl.int32)
    for c in tl.static_range(_CANDIDATES):
        key = tl.full(byte.shape, c, tl.int32)
        key = _weigh(key, n1, _KEYS[c][0])
        key = _weigh(key, n2, _KEYS[c][1])
        key = _weigh(key, n3, _KEYS[c][2])
        key = _weigh(key, n4, _KEYS[c][3])
        key = _weigh(key, n6, _KEYS[c][4])
        key = _weigh(key, n8p, _KEYS[c][5])
        key = _weigh(key, n8n, _KEYS[c][6])
        key = _weigh(key, n12p, _KEYS[c][7])
        key = _weigh(key, n12n, _KEYS[c][8])
        best = tl.minimum(best, key)
    choice = best & 15
    sizes = tl.load(table + choice).to(tl.uint32, bitcast=True)
    flipped = (_NEGATIVE >> choice) & 1
    below = s ^ (-flipped).to(tl.uint32, bitcast=True)

    fit, norm = _fit(0, 0, n1, sizes, 1, 1)
    fit, norm = _fit(fit, norm, n2, sizes, 2, 2)
    fit, norm = _fit(fit, norm, n3, sizes, 3, 3)
    fit, norm = _fit(fit, norm, n4, sizes, 4, 4)
    fit, norm = _fit(fit, norm, n6, sizes, 5, 6)
    fit, norm = _fit(fit, norm, n8, sizes, 6, 8)
    fit, norm = _fit(fit, norm, n12, sizes, 7, 12)
    # A code 8 that is not below zero is 7 instead: one step less of v, 64 - 49 less of the square.
    over8 = tl.where(flipped != 0, n8n, n8p) * ((sizes >> 27) & 1).to(tl.int32)
    over12 = tl.where(flipped != 0, n12n, n12p) * (sizes >> 31).to(tl.int32)
    fit -= 8 * over8 + 12 * over12
    norm -= 15 * (over8 + over12)

    empty = norm == 0
    fit, norm = tl.where(empty, 1, fit), tl.where(empty, 1, norm)
    j = tl.minimum(byte, tl.where(fit < 2 * norm, 2, 1))
    mantissa = ((fit << (j + 6)) + norm) // (2 * norm)
    return sizes, below, mantissa + 128 * (byte - j) + (flipped << 15)


@triton.jit
def _choose_absmax(table, byte, s, m1, m2, m3, m4, m5, m6, m7):
    """As `_choose_mse`."""
    zeros = tl.zeros(byte.shape, tl.int32)
    largest = tl.where(m1 != 0, zeros + 1, zeros)
    largest = tl.where(m2 != 0, zeros + 2, largest)
    largest = tl.where(m3 != 0, zeros + 3, largest)
    largest = tl.where(m4 != 0, zeros + 4, largest)
    largest = tl.where(m5 != 0, zeros + 5, largest)
    largest = tl.where(m6 != 0, zeros + 6, largest)
    largest = tl.where(m7 != 0, zeros + 7, largest)
    floor = byte <= tl.load(table + 32 + largest)
    under = tl.minimum(tl.maximum(byte - _FIRST_FLOOR_BYTE, 0), _LAST_FLOOR) + _FLOOR_MAPS
    choice = tl.where(floor & (largest > 0), under, largest)
    sizes = tl.load(table + choice).to(tl.uint32, bitcast=True)
    bits = tl.where(floor, zeros + _FLOOR_BITS, 128 * byte + tl.load(table + 64 + largest))
    return sizes, s, bits


@triton.jit
def _convert_kernel(
    weight,  # int64, two a group
    scale,  # uint8, one a group
    table,
    out_weight,  # int64
    out_scale,  # int16
    rows,  # E * N
    per_expert,  # N
    groups: tl.constexpr,  # of a row
    LAYOUT: tl.constexpr,
    MSE: tl.constexpr,
    TILE: tl.constexpr,  # groups a program
):
    """One group a lane. "aiter": lanes run down the 16 rows of a block first, then along K, so that
    the 8 bytes of half a group in 16 rows are one run of 128, and a program writes one run of
    TILE * 16. Else lanes run along K, as the output does."""
    lane = tl.arange(0, TILE)
    if LAYOUT == AITER:
        start = tl.program_id(0).to(tl.int64) * (TILE // ROWS)
        block = start // groups
        column = (start - block * groups).to(tl.int32) + lane // ROWS
        local = column // groups
        group = column - local * groups
        local_row = local * ROWS + lane % ROWS
        first = block * (ROWS * groups)
        offset = local_row * groups + group
    else:
        first = tl.program_id(0).to(tl.int64) * TILE
        offset = lane
    mask = offset < rows.to(tl.int64) * groups - first
    byte = tl.load(scale + first + offset, mask=mask, other=0).to(tl.int32)
    low = tl.load(weight + first * 2 + offset * 2, mask=mask, other=0).to(tl.uint64, bitcast=True)
    high = tl.load(weight + first * 2 + (offset * 2 + 1), mask=mask, other=0)
    high = high.to(tl.uint64, bitcast=True)

    p0, p1, p2, s = to_planes(
        low.to(tl.uint32), (low >> 32).to(tl.uint32), high.to(tl.uint32), (high >> 32).to(tl.uint32)
    )
    m1, m2, m3 = p0 & ~p1 & ~p2, p1 & ~p0 & ~p2, p0 & p1 & ~p2
    m4, m5, m6, m7 = p2 & ~p0 & ~p1, p2 & p0 & ~p1, p2 & p1 & ~p0, p0 & p1 & p2
    if MSE:
        sizes, below, bits = _choose_mse(table, byte, s, m1, m2, m3, m4, m5, m6, m7)
    else:
        sizes, below, bits = _choose_absmax(table, byte, s, m1, m2, m3, m4, m5, m6, m7)
    q0, q1, q2, q3 = code_planes(sizes, below, m1, m2, m3, m4, m5, m6, m7)
    w0, w1, w2, w3 = to_planes(q0, q1, q2, q3)

    if LAYOUT == AITER:
        w0, w1, w2, w3 = aiter_word(w0), aiter_word(w1), aiter_word(w2), aiter_word(w3)
        place = out_weight + start * 32 + ((lane // ROWS) * 32 + lane % ROWS)
        tl.store(place, join_words(w0, w1), mask=mask)
        tl.store(place + ROWS, join_words(w2, w3), mask=mask)
        # [E, G/2, N, 2]
        row = block * ROWS + local_row
        expert = row // per_expert
        spot = (expert * (groups // 2) + group // 2) * per_expert + (row - expert * per_expert)
        tl.store(out_scale + spot * 2 + group % 2, bits.to(tl.int16), mask=mask)
    else:
        tl.store(out_scale + first + offset, bits.to(tl.int16), mask=mask)
        if LAYOUT == PACK_QUANTIZED:
            place = out_weight + first * 2 + offset * 2
            tl.store(place, join_words(w0 ^ 0x88888888, w1 ^ 0x88888888), mask=mask)
            tl.store(place + 1, join_words(w2 ^ 0x88888888, w3 ^ 0x88888888), mask=mask)
        else:
            place = out_weight + first * 4 + offset * 4
            tl.store(place, plain_words(w0), mask=mask)
            tl.store(place + 1, plain_words(w1), mask=mask)
            tl.store(place + 2, plain_words(w2), mask=mask)
            tl.store(place + 3, plain_words(w3), mask=mask)


def convert_slab(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    """Convert uint8 [E, N, K/2] and uint8 [E, N, G] into buffers shaped as `layouts` says; the
    scale buffer is int16 (bf16 bits). Sources and buffers that are not contiguous are copied."""
    e, n, g = scale.shape
    weight, scale = weight.contiguous(), scale.contiguous()
    target, bits = out_weight.contiguous(), out_scale.contiguous()
    _convert_kernel[(triton.cdiv(e * n * g, TILE),)](
        weight.view(torch.int64),
        scale,
        _tables(scale_rule, weight.device),
        target.view(torch.int64),
        bits,
        e * n,
        n,
        groups=g,
        LAYOUT=_LAYOUT_CODES[layout],
        MSE=scale_rule == "mse",
        TILE=TILE,
        num_warps=WARPS,
    )
    for buffer, written in ((out_weight, target), (out_scale, bits)):
        if written is not buffer:
            buffer.copy_(written)
