# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""The conversion as one fused Triton kernel, for CUDA and ROCm (and Triton's interpreter).

Reads packed e2m1 and e8m0 bytes, chooses the scale and writes codes and scales in their final
layout; nothing in between goes through memory. Decides exactly as `naive` does, in integers.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from .definition import (
    ABSMAX_FLOOR_BITS,
    CANDIDATES,
    FLOOR_BYTES,
    KEY,
    MAGNITUDES,
    OVERFLOW,
    candidate_error,
)
from .layouts import aligned
from .triton_bits import (
    PRMT,
    SPELLED,
    V_PERM,
    aiter_word,
    divide,
    int8_word,
    join_words,
    look_up,
    packed_word,
    popcount,
    to_planes,
)
from .triton_tables import tables

# Columns of `triton_tables`.
_COLUMNS = tl.constexpr(4)
_BELOW, _MORE = (tl.constexpr(i) for i in (1, 2))

AITER, PACK_QUANTIZED, PLAIN = (tl.constexpr(i) for i in range(3))
_LAYOUT_CODES = {"aiter": 0, "pack_quantized": 1, "plain": 2}
ROWS = tl.constexpr(16)  # of an "aiter" block
TILE = 128  # groups worked on at a time where nothing else decides
# A program holds whole blocks of 16 rows in registers, at most this many groups.
HELD_GROUPS = 4096

_FIRST_FLOOR_BYTE = tl.constexpr(FLOOR_BYTES[0])
_FLOOR_MAPS = tl.constexpr(len(MAGNITUDES))
_LAST_FLOOR = tl.constexpr(len(FLOOR_BYTES) - 1)
_FLOOR_BITS = tl.constexpr(ABSMAX_FLOOR_BITS)


# Error of each candidate at 1, 2, 3, 4, 6, 8, -8, 12, -12 half units, times 16 so that candidate
# numbers fit below: the least key is the least error, the first of equals.
_VALUES = (1, 2, 3, 4, 6, 8, -8, 12, -12)
_KEYS = tl.constexpr(tuple(tuple(KEY * candidate_error(v, c) for v in _VALUES) for c in CANDIDATES))
_CANDIDATES = tl.constexpr(len(CANDIDATES))
_NEGATIVE = tl.constexpr(sum((c < 0) << i for i, c in enumerate(CANDIDATES)))


@triton.jit
def _weigh(key, count, weight: tl.constexpr):
    """key + count * weight, and no operation where the weight is 0."""
    if weight == 0:
        return key
    return key + count * weight


@triton.jit
def _weigh_signs(key, count, above, below, weight: tl.constexpr, other: tl.constexpr):
    """key + above * weight + below * other, where above + below = count."""
    if weight == other:
        return _weigh(key, count, weight)
    return _weigh(_weigh(key, above, weight), below, other)


@triton.jit
def _fit(fit, norm, count, sizes, index: tl.constexpr, value: tl.constexpr):
    """Add `count` codes of magnitude `value` to sum(v*q) and sum(q*q)."""
    code = ((sizes >> (8 * index)) & 255).to(tl.int32)
    part = count * code
    return fit + part * value, norm + part * code


@triton.jit
def _choose_mse(table, byte, s, m1, m2, m3, m4, m5, m6, m7):
    """-> row of the table, bf16 scale bits; planes as in triton_bits."""
    n1, n2, n3, n4 = popcount(m1), popcount(m2), popcount(m3), popcount(m4)
    n6, n8, n12 = popcount(m5), popcount(m6), popcount(m7)
    n8n, n12n = popcount(m6 & s), popcount(m7 & s)
    n8p, n12p = n8 - n8n, n12 - n12n
    zeros = tl.zeros(byte.shape, tl.int32)
    best = zeros + 0x7FFFFFFF
    for c in tl.static_range(_CANDIDATES):
        # Candidates of either sign differ in the last terms only; the sums before are shared.
        key = _weigh(zeros, n1, _KEYS[c][0])
        key = _weigh(key, n2, _KEYS[c][1])
        key = _weigh(key, n3, _KEYS[c][2])
        key = _weigh(key, n4, _KEYS[c][3])
        key = _weigh(key, n6, _KEYS[c][4])
        key = _weigh_signs(key, n8, n8p, n8n, _KEYS[c][5], _KEYS[c][6])
        key = _weigh_signs(key, n12, n12p, n12n, _KEYS[c][7], _KEYS[c][8])
        best = tl.minimum(best, key + c)
    choice = best & 15
    sizes = tl.load(table + choice * _COLUMNS + _MORE)
    small, large = sizes.to(tl.uint32), (sizes >> 32).to(tl.uint32)
    flipped = (_NEGATIVE >> choice) & 1

    fit, norm = _fit(zeros, zeros, n1, small, 1, 1)
    fit, norm = _fit(fit, norm, n2, small, 2, 2)
    fit, norm = _fit(fit, norm, n3, small, 3, 3)
    fit, norm = _fit(fit, norm, n4, large, 0, 4)
    fit, norm = _fit(fit, norm, n6, large, 1, 6)
    fit, norm = _fit(fit, norm, n8, large, 2, 8)
    fit, norm = _fit(fit, norm, n12, large, 3, 12)
    # A code 8 that is not below zero is 7 instead: one step less of v, 64 - 49 less of the square.
    over8 = tl.where(flipped != 0, n8n, n8p) * ((large >> 19) & 1).to(tl.int32)
    over12 = tl.where(flipped != 0, n12n, n12p) * (large >> 27).to(tl.int32)
    fit -= 8 * over8 + 12 * over12
    norm -= 15 * (over8 + over12)

    empty = norm == 0
    fit, norm = tl.where(empty, 1, fit), tl.where(empty, 1, norm)
    j = tl.minimum(byte, tl.where(fit < 2 * norm, 2, 1))
    mantissa = divide((fit << (j + 6)) + norm, 2 * norm)
    return choice, mantissa + 128 * (byte - j) + (flipped << 15)


@triton.jit
def _choose_absmax(table, byte, p0, p1, p2):
    """As `_choose_mse`."""
    ones = tl.zeros(byte.shape, tl.uint32) + 0xFFFFFFFF
    # Of the codes with the highest bits so far, those that have the next bit, if any has.
    top2 = p2 != 0
    left = tl.where(top2, p2, ones)
    top1 = (p1 & left) != 0
    left = tl.where(top1, p1 & left, left)
    largest = top2.to(tl.int32) * 4 + top1.to(tl.int32) * 2 + ((p0 & left) != 0).to(tl.int32)
    row = tl.load(table + largest * _COLUMNS + _MORE)
    floor = byte <= row.to(tl.int32)
    under = tl.minimum(tl.maximum(byte - _FIRST_FLOOR_BYTE, 0), _LAST_FLOOR) + _FLOOR_MAPS
    choice = tl.where(floor & (largest > 0), under, largest)
    bits = tl.where(floor, _FLOOR_BITS, 128 * byte + (row >> 32).to(tl.int32))
    return choice, bits


@triton.jit
def _convert_group(table, low, high, byte, MSE: tl.constexpr, PERMUTE: tl.constexpr):
    """16 bytes of a group as two uint64, and its e8m0 byte -> eight words of four new codes each,
    one a byte, in the order of the source, and bf16 scale bits."""
    w0, w1 = low.to(tl.uint32), (low >> 32).to(tl.uint32)
    w2, w3 = high.to(tl.uint32), (high >> 32).to(tl.uint32)
    p0, p1, p2, s = to_planes(w0, w1, w2, w3)
    if MSE:
        m1, m2, m3 = p0 & ~p1 & ~p2, p1 & ~p0 & ~p2, p0 & p1 & ~p2
        m4, m5, m6, m7 = p2 & ~p0 & ~p1, p2 & p0 & ~p1, p2 & p1 & ~p0, p0 & p1 & p2
        choice, bits = _choose_mse(table, byte, s, m1, m2, m3, m4, m5, m6, m7)
    else:
        choice, bits = _choose_absmax(table, byte, p0, p1, p2)
    above, below = tl.load(table + choice * _COLUMNS), tl.load(table + choice * _COLUMNS + _BELOW)
    a0, b0 = look_up(w0, above, below, PERMUTE)
    a1, b1 = look_up(w1, above, below, PERMUTE)
    a2, b2 = look_up(w2, above, below, PERMUTE)
    a3, b3 = look_up(w3, above, below, PERMUTE)
    return a0, b0, a1, b1, a2, b2, a3, b3, bits


@triton.jit
def _convert_kernel(
    weight,  # int64, two a group
    scale,  # uint8, one a group
    table,
    out_weight,  # int64; may be `weight` where IN_PLACE
    out_scale,  # int16
    total,  # groups in all
    guard,  # None, or int32: where it is not 0, nothing is written
    per_expert: tl.constexpr,  # rows, N
    groups: tl.constexpr,  # of a row, G
    LAYOUT: tl.constexpr,
    MSE: tl.constexpr,
    SPAN: tl.constexpr,  # groups a program
    TILE: tl.constexpr,  # groups worked on at a time
    TILES: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PERMUTE: tl.constexpr,  # which GPU's instruction, see `triton_bits`
):
    """One group a lane. "aiter": lanes run down the 16 rows, then along K, so that a warp writes
    whole lines and reads two groups of each row, a whole sector (a wave of 64 lanes: four); a
    program writes one run of SPAN * 16 bytes. Else lanes run along K.

    A program reads all its groups before it writes any. In place, SPAN is whole blocks of 16 rows,
    so that no program writes what another one reads.
    """
    if guard is not None:
        total = tl.where(tl.load(guard) == 0, total, 0)
    start = tl.program_id(0).to(tl.int64) * SPAN
    if LAYOUT == AITER:
        block = start // (ROWS * groups)
        first = block * (ROWS * groups)
        expert = block // (per_expert // ROWS)
        block_row = ((block - expert * (per_expert // ROWS)) * ROWS).to(tl.int32)
        scale_start = expert * (per_expert * groups)
    else:
        first = start
    ahead = (start - first).to(tl.int32)
    sources = ()
    for tile in tl.static_range(TILES):
        place = tile * TILE + tl.arange(0, TILE)
        mask = (place < SPAN) & (start + place < total)
        if LAYOUT == AITER:
            column = (ahead + place) // ROWS
            row = (column // groups) * ROWS + place % ROWS
            offset = row * groups + column % groups
        else:
            offset = place
        byte = tl.load(scale + first + offset, mask=mask, other=0).to(tl.int32)
        if PERMUTE == PRMT:
            # One access of 16 bytes. For AMD Triton makes it two, and moves lanes through LDS.
            pair = offset[:, None] * 2 + tl.arange(0, 2)[None, :]
            both = tl.load(weight + first * 2 + pair, mask=mask[:, None], other=0)
            low, high = tl.split(both)
        else:
            low = tl.load(weight + first * 2 + offset * 2, mask=mask, other=0)
            high = tl.load(weight + first * 2 + (offset * 2 + 1), mask=mask, other=0)
        sources += (  # type: ignore[assignment]
            byte,
            low.to(tl.uint64, bitcast=True),
            high.to(tl.uint64, bitcast=True),
        )
    if IN_PLACE:
        tl.debug_barrier()
    for tile in tl.static_range(TILES):
        place = tile * TILE + tl.arange(0, TILE)
        mask = (place < SPAN) & (start + place < total)
        a0, b0, a1, b1, a2, b2, a3, b3, bits = _convert_group(
            table, sources[3 * tile + 1], sources[3 * tile + 2], sources[3 * tile], MSE, PERMUTE
        )
        if LAYOUT == AITER:
            # Of a column's 256 bytes the halves of the groups come first: 16 rows of 8 bytes each.
            target = out_weight + start * 2 + (place + place // ROWS * ROWS)
            tl.store(target, join_words(aiter_word(a0, b0), aiter_word(a1, b1)), mask=mask)
            tl.store(target + ROWS, join_words(aiter_word(a2, b2), aiter_word(a3, b3)), mask=mask)
            # [E, G/2, N, 2]
            column = (ahead + place) // ROWS
            row = block_row + (column // groups) * ROWS + place % ROWS
            group = column % groups
            spot = (row // per_expert) * (per_expert * groups) + (row % per_expert) * 2
            spot += (group // 2) * (2 * per_expert) + group % 2
            tl.store(out_scale + scale_start + spot, bits.to(tl.int16), mask=mask)
        else:
            tl.store(out_scale + first + place, bits.to(tl.int16), mask=mask)
            if LAYOUT == PACK_QUANTIZED:
                target = out_weight + first * 2 + place * 2
                words = join_words(packed_word(a0, b0), packed_word(a1, b1))
                tl.store(target, words, mask=mask)
                words = join_words(packed_word(a2, b2), packed_word(a3, b3))
                tl.store(target + 1, words, mask=mask)
            else:
                target = out_weight + first * 4 + place * 4
                tl.store(target, join_words(int8_word(a0), int8_word(b0)), mask=mask)
                tl.store(target + 1, join_words(int8_word(a1), int8_word(b1)), mask=mask)
                tl.store(target + 2, join_words(int8_word(a2), int8_word(b2)), mask=mask)
                tl.store(target + 3, join_words(int8_word(a3), int8_word(b3)), mask=mask)


@triton.jit
def _largest_kernel(scale, result, count, BLOCK: tl.constexpr, FLOOR: tl.constexpr):
    """Raise result[0] to the largest byte, if that is FLOOR or more."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.max(tl.load(scale + at, mask=at < count, other=0).to(tl.int32), axis=0)
    if largest >= FLOOR:
        tl.atomic_max(result, largest)


def _largest(scale: torch.Tensor) -> torch.Tensor:
    """int32 [1] on the device: the largest byte of a uint8 tensor if it is one that overflows or is
    NaN, else 0. Does not wait for the device."""
    scale = aligned(scale)
    result = torch.zeros(1, dtype=torch.int32, device=scale.device)
    grid = (-(-scale.numel() // 16384),)
    _largest_kernel[grid](
        scale, result, scale.numel(), BLOCK=16384, FLOOR=min(OVERFLOW), num_warps=8
    )
    return result


def largest_byte(scale: torch.Tensor) -> int:
    """The largest byte if it is one that overflows or is NaN, else 0."""
    return int(_largest(scale))


@lru_cache(maxsize=16)
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Of the streams with priority: those of the others that callers make are handed out again."""
    return torch.cuda.Stream(device, priority=-1)


def guard(scale: torch.Tensor) -> tuple[torch.Tensor, Callable[[], int]]:
    """`largest_byte` as an int32 [1] on the device, and a call that waits for it, but for nothing
    that the device is given after this."""
    largest = _largest(scale)
    ready = torch.cuda.Event()
    ready.record()

    def wait() -> int:
        aside = _aside(largest.device)
        with torch.cuda.stream(aside):
            aside.wait_event(ready)
            return int(largest)

    return largest, wait


@lru_cache(maxsize=64)
def _spans(groups: int, layout: str, lanes: int) -> tuple[int, int, int]:
    """SPAN, TILES and warps of a launch, for warps of so many lanes.

    "aiter": whole blocks of 16 rows, about a thousand groups, in the tiles that leave the fewest
    lanes idle; of these, tiles of at most 256. Rows too long for that, and the other layouts: four
    tiles wherever they end.
    """
    block = 16 * groups
    if layout != "aiter" or block > HELD_GROUPS:
        return 4 * TILE, 4, TILE // lanes
    choices = []
    for span in range(block, max(block, 1024) + 1, block):
        for tile in (32, 64, 128, 256, 512):
            tiles = -(-span // tile)
            if tiles <= 8 and tile >= lanes:
                idle = 64 * (tiles * tile - span) // span
                choices.append((idle, tile > 256, abs(tiles - 4), span, tiles, tile // lanes))
    *_, span, tiles, warps = min(choices)
    return span, tiles, warps


@lru_cache(maxsize=16)
def _target(device: torch.device) -> tuple[int, int]:
    """How the GPU at hand permutes bytes, and the lanes of its warps (AMD: waves). On the CPU
    Triton interprets, which knows no assembly."""
    if device.type == "cpu":
        return SPELLED.value, 32
    permute = PRMT if torch.version.hip is None else V_PERM
    return permute.value, torch.cuda.get_device_properties(device).warp_size


def converts_in_place(layout: str, groups: int) -> bool:
    """Whether `convert_slab` may be given `weight` itself as its output."""
    return layout != "plain" and (layout != "aiter" or 16 * groups <= HELD_GROUPS)


def convert_slab(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
    unless: torch.Tensor | None = None,
) -> None:
    """Convert uint8 [E, N, K/2] and uint8 [E, N, G] into buffers shaped as `layouts` says; the
    scale buffer is int16 (bf16 bits). Sources and buffers that are not contiguous are copied.
    `unless`, an int32 [1] on the device that is not 0, lets the kernel write nothing."""
    e, n, g = scale.shape
    weight, scale = aligned(weight), aligned(scale)
    target, bits = out_weight.contiguous(), out_scale.contiguous()
    permute, lanes = _target(weight.device)
    span, tiles, warps = _spans(g, layout, lanes)
    _convert_kernel[(-(-e * n * g // span),)](
        weight.view(torch.int64),
        scale,
        tables(scale_rule, layout).to(weight.device, non_blocking=True),
        target.view(torch.int64),
        bits,
        e * n * g,
        unless,
        per_expert=n,
        groups=g,
        LAYOUT=_LAYOUT_CODES[layout],
        MSE=scale_rule == "mse",
        SPAN=span,
        TILE=lanes * warps,
        TILES=tiles,
        IN_PLACE=target.data_ptr() == weight.data_ptr(),
        PERMUTE=permute,
        num_warps=warps,
    )
    for buffer, written in ((out_weight, target), (out_scale, bits)):
        if written is not buffer:
            buffer.copy_(written)
