# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The conversion on a CPU: torch operations on tables, no arithmetic per code. Also runs on a GPU
without Triton.

Four codes (16 bits) are looked up at a time. A first table gives how often each magnitude occurs in
them, as bit fields that `embedding_bag` adds up over a group; candidates, scale and bits come from
those counts, one group a lane. A second table, per candidate, gives the four new codes. The
decisions are those of `naive`, in exact integers; no code here is on the way of a GPU load.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from threading import Barrier

import torch

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
from .layouts import aligned, place_scales
from .naive import unpack_values

WORDS = 8  # 16-bit words of four codes in a group
BLOCK_GROUPS = 16384  # the lanes of one block: a column of int32 is 64 KiB
PATTERNS = 1 << 16
FIELD_BITS = 6  # a count goes up to 32
# The signed values (half units) that are counted, by the column of the table that holds their
# counts. A column is a float32: four fields are 24 bits, which it holds exactly. Up to 6 a
# candidate treats both signs alike; at 8 and 12 codes can clamp on one side.
COLUMNS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1, -1), (2, -2), (3, -3), (4, -4)),
    ((6, -6), (8,), (-8,)),
    ((12,), (-12,)),
)
FIELDS = tuple(values[0] for column in COLUMNS for values in column)
INDEX_BITS = 4  # errors and candidate numbers are compared as one integer

# The "absmax" code maps: by largest magnitude above the 1e-6 floor, then by byte under it.
FLOOR_BYTES = range(100, 109)


@lru_cache(maxsize=4)
def _patterns(device: torch.device) -> torch.Tensor:
    """int64 [65536, 4], the values of every run of four codes, in half units."""
    words = torch.arange(PATTERNS, dtype=torch.int32, device=device).to(torch.uint16)
    return unpack_values(words.view(torch.uint8).view(PATTERNS, 2))


@lru_cache(maxsize=4)
def _count_table(device: torch.device) -> torch.Tensor:
    """float32 [65536, 4]: the counts of COLUMNS as bit fields; the last column is unused."""
    values = _patterns(device)
    table = torch.zeros(PATTERNS, 4, dtype=torch.float32, device=device)
    for column, fields in enumerate(COLUMNS):
        for place, counted in enumerate(fields):
            hits = sum((values == value).sum(1) for value in counted)
            table[:, column] += hits * 2.0 ** (FIELD_BITS * place)
    return table


def _code_table(codes: list[dict[int, int]], order: str, device: torch.device) -> torch.Tensor:
    """int32 [maps * 65536]: the four codes of every pattern under each map of value to code.

    order "aiter": one code in the low nibble of each byte; "words": 16 bits in order, code + 8;
    "plain": one int8 a byte."""
    shifts = torch.arange(4, device=device) * (4 if order == "words" else 8)
    tables = []
    for code in codes:
        by_value = torch.tensor([code.get(v, 0) for v in range(-12, 13)], device=device)
        new = by_value[_patterns(device) + 12]
        new = new + 8 if order == "words" else new & (15 if order == "aiter" else 255)
        tables.append((new << shifts).sum(1))
    return torch.cat(tables).to(torch.int32)


_ORDERS = {"aiter": "aiter", "pack_quantized": "words", "plain": "plain"}


@lru_cache(maxsize=12)
def _mse_codes(layout: str, device: torch.device) -> torch.Tensor:
    signed = [sign * m for m in MAGNITUDES for sign in (1, -1)]
    maps = [{v: candidate_code(v, c) for v in signed} for c in CANDIDATES]
    return _code_table(maps, _ORDERS[layout], device)


@lru_cache(maxsize=12)
def _absmax_codes(layout: str, device: torch.device) -> torch.Tensor:
    def code_map(largest: int, byte: int) -> dict[int, int]:
        sizes = [m for m in MAGNITUDES if m <= largest]
        return {s * m: absmax_code(s * m, largest, byte) for m in sizes for s in (1, -1)}

    above = [code_map(m, 200) for m in MAGNITUDES]
    under = []
    for byte in FLOOR_BYTES:
        sizes = [m for m, top in zip(MAGNITUDES, ABSMAX_FLOOR_BYTE, strict=True) if byte <= top]
        under.append(code_map(max(sizes), byte))
    return _code_table(above + under, _ORDERS[layout], device)


@lru_cache(maxsize=4)
def _fit_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """By candidate, packed over FIELDS: int64 of |code| (4 bits each), and the sign bit."""
    sizes = [
        sum(abs(candidate_code(v, c)) << (4 * i) for i, v in enumerate(FIELDS)) for c in CANDIDATES
    ]
    signs = [0x8000 * (c < 0) for c in CANDIDATES]
    return (
        torch.tensor(sizes, dtype=torch.int64, device=device),
        torch.tensor(signs, dtype=torch.int32, device=device),
    )


def _words(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [R, 16] -> int32 [R, 8], each the index of a pattern."""
    return packed.view(torch.uint16).to(torch.int32)


def _choose_mse(words: torch.Tensor, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [R, 8], int32 [R] -> candidate int32 [R], scale bits int32 [R]."""
    device = words.device
    starts = torch.arange(0, words.numel(), WORDS, dtype=torch.int32, device=device)
    sums = torch.embedding_bag(_count_table(device), words.view(-1), starts)[0]
    counts = []
    for column, fields in enumerate(COLUMNS):
        packed = sums[:, column].to(torch.int32)
        for place in range(len(fields)):
            shifted = packed >> (FIELD_BITS * place) if place else packed
            counts.append(shifted & 63 if place + 1 < len(fields) else shifted)

    best = None
    for index, numerator in enumerate(CANDIDATES):
        key = torch.full_like(byte, index)
        for count, value in zip(counts, FIELDS, strict=True):
            weight = candidate_error(value, numerator) << INDEX_BITS
            if weight:
                key.add_(count, alpha=weight)
        best = key if best is None else torch.minimum(best, key, out=best)
    assert best is not None
    choice = best & ((1 << INDEX_BITS) - 1)

    sizes, signs = _fit_tables(device)
    size = sizes.index_select(0, choice)
    fit, norm = torch.zeros_like(byte), torch.zeros_like(byte)
    for place, (count, value) in enumerate(zip(counts, FIELDS, strict=True)):
        code = ((size >> (4 * place)) & 15).to(torch.int32)
        part = count * code
        fit.add_(part, alpha=abs(value))
        norm.addcmul_(part, code)
    bits = _fit_scale(fit, norm, byte).add_(signs.index_select(0, choice))
    return choice, bits


def _fit_scale(fit: torch.Tensor, norm: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """bf16 bits of fit/norm half units at `byte`, as `naive.quantize_mse` defines them."""
    empty = norm == 0
    fit, norm = fit + empty, norm + empty
    j = torch.minimum(byte, 1 + (fit < 2 * norm).to(torch.int32))
    # Numerator and denominator are under 2^20, so the float32 quotient's floor is exact: a quotient
    # that is no integer is further than 2^-20 of itself from one, and rounding moves it by 2^-24.
    scaled = (fit << (j + 6)) + norm
    mantissa = (scaled.float() / (2 * norm).float()).to(torch.int32)
    return mantissa.add_(byte - j, alpha=128)


def _choose_absmax(packed: torch.Tensor, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [R, 16], int32 [R] -> code map int32 [R], scale bits int32 [R]."""
    device = packed.device
    largest = torch.maximum(packed & 7, (packed >> 4) & 7).amax(1).long()
    top = torch.tensor(ABSMAX_FLOOR_BYTE, dtype=torch.int32, device=device)[largest]
    offset = torch.tensor(ABSMAX_SCALE_OFFSET, dtype=torch.int32, device=device)[largest]
    floor = byte <= top
    under = len(MAGNITUDES) + (byte - FLOOR_BYTES[0]).clamp(0, len(FLOOR_BYTES) - 1)
    choice = torch.where(floor & (largest > 0), under, largest.to(torch.int32))
    return choice, torch.where(floor, ABSMAX_FLOOR_BITS, 128 * byte + offset)


def _block(
    packed: torch.Tensor, byte: torch.Tensor, layout: str, scale_rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [R, 16], uint8 [R] -> the groups' new bytes in `layout` (each group on its own, in
    int32 words [R, W]) and int16 scale bits [R]."""
    byte = byte.to(torch.int32)
    words = _words(packed)
    if scale_rule == "mse":
        choice, bits = _choose_mse(words, byte)
        table = _mse_codes(layout, packed.device)
    else:
        choice, bits = _choose_absmax(packed, byte)
        table = _absmax_codes(layout, packed.device)
    index = words.add_(choice.mul_(PATTERNS)[:, None])
    codes = table.index_select(0, index.view(-1)).view(-1, WORDS)
    if layout == "aiter":
        codes = torch.add(codes[:, 0::2], codes[:, 1::2], alpha=16)
    elif layout == "pack_quantized":
        codes = torch.add(codes[:, 0::2], codes[:, 1::2], alpha=PATTERNS)
    return codes, bits.to(torch.int16)


def _convert_rows(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    """One block: uint8 [N, K/2] and [N, G] of one expert into its part of the buffers."""
    n, g = scale.shape
    codes, bits = _block(aligned(weight).view(-1, 16), scale.reshape(-1), layout, scale_rule)
    if layout == "aiter":
        # int64 is 16 codes, the half of a group: [row, group, half] -> [group, half, row] per tile
        tiles = codes.view(torch.int64).view(n // 16, 16, g, 2).permute(0, 2, 3, 1)
        out_weight.view(torch.int64).view(n // 16, g, 2, 16).copy_(tiles)
    else:
        out_weight.copy_(codes.view(out_weight.dtype).view(out_weight.shape))
    out_scale.copy_(place_scales(bits.view(1, n, g), layout)[0])


def largest_byte(scale: torch.Tensor) -> int:
    """The largest of a uint8 tensor that is not empty."""
    return int(scale.max())


def converts_in_place(layout: str, groups: int) -> bool:
    """Whether `convert_slab` may be given the bytes of `weight` as its output: a block of rows is
    read before it is written, and takes the same bytes in both forms."""
    return layout != "plain"


def convert_slab(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    """Convert uint8 [E, N, K/2] and uint8 [E, N, G] into buffers shaped as `layouts` says; the
    scale buffer is int16 (bf16 bits). Blocks of rows run on torch.get_num_threads() threads."""
    e, n, g = scale.shape
    rows = max(16, BLOCK_GROUPS // g // 16 * 16)
    jobs = []
    for expert in range(e):
        for start, end in pairwise([*range(0, n, rows), n]):
            part = slice(start, end)
            places = (slice(None), part) if layout == "aiter" else (part,)
            jobs.append(
                (
                    weight[expert, part],
                    scale[expert, part],
                    layout,
                    scale_rule,
                    out_weight[expert, part],
                    out_scale[expert][places],
                )
            )
    threads = min(torch.get_num_threads(), len(jobs)) if weight.device.type == "cpu" else 1
    if threads == 1:
        for job in jobs:
            _convert_rows(*job)
        return
    table = _mse_codes if scale_rule == "mse" else _absmax_codes
    table(layout, weight.device), _count_table(weight.device), _fit_tables(weight.device)
    inference = torch.is_inference_mode_enabled()  # kept per thread

    def run(job: tuple[torch.Tensor, ...]) -> None:
        with torch.inference_mode(inference):
            _convert_rows(*job)

    with _Workers(threads) as pool:
        for _ in pool.map(run, jobs):
            pass


class _Workers(ThreadPoolExecutor):
    """Threads whose torch operations do not start threads of their own.

    torch keeps OpenMP's thread count per calling thread, but hands new threads and MKL the value
    set last, so the caller's is set again once every worker has started.
    """

    def __init__(self, threads: int) -> None:
        outer = torch.get_num_threads()
        super().__init__(threads, initializer=torch.set_num_threads, initargs=(1,))
        ready = Barrier(threads + 1)
        for _ in range(threads):
            self.submit(ready.wait)
        ready.wait()
        torch.set_num_threads(outer)
