# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Compares rows of an int4 matrix with the MXFP4 rows that they were made of.

The only module here that uses torch. A group is compared in half units of its own scale byte, in
which its source is a small integer and its result a short float: nothing overflows, whatever the
scale, and a group counts as exact only if every bit of every value is.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import torch

from kimi_k3.fidelity.figures import EXPONENTS, SIGNS, Figures, Group, worst
from kimi_k3.fidelity.files import Matrix
from mxfp4_int4 import dequant, naive
from mxfp4_int4.definition import GROUP_SIZE

# A byte of two codes that are zero, each stored plus 8.
ZERO_CODES = 0x88
# Values in work at a time: a few MB of intermediates, which stay in a core's cache.
PIECE = 1 << 17
# Matrices that are handed out at a time.
BATCH = 256
# Blocks of rows that a sample of a matrix is spread over.
BLOCKS = 8


def sampled_rows(rows: int, share: float) -> list[tuple[int, int]]:
    """Return (first row, count) of evenly spread blocks that hold about a share of all rows."""
    wanted = min(rows, max(1, round(rows * share)))
    blocks = 1 if wanted == rows > 0 else min(BLOCKS, wanted)
    return [
        (block * rows // blocks, wanted // blocks + (block < wanted % blocks))
        for block in range(blocks)
    ]


def measure_all(
    matrices: Sequence[Matrix], share: float, keep: int
) -> Iterator[tuple[Figures, list[Group]]]:
    """Measure matrices on all cores, one thread each, and yield what was found in their order.

    Many small operations on torch's own threads would take twenty times as long where other
    programs have the cores: every one of them waits for every thread.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for start in range(0, len(matrices), BATCH):
            batch = matrices[start : start + BATCH]
            yield from pool.map(lambda matrix: measure_matrix(matrix, share, keep), batch)
    finally:
        # Whoever stops in between does not wait for the rest of the batch.
        pool.shutdown(cancel_futures=True)


def measure_matrix(matrix: Matrix, share: float, keep: int) -> tuple[Figures, list[Group]]:
    """Count and compare a matrix, or a share of its rows.

    Args:
        matrix: With or without a source.
        share: Of its rows.
        keep: How many of the worst groups to return.

    Raises:
        ReportError: A file became shorter meanwhile.
    """
    total, groups = Figures(matrices=1), []
    for first, count in _pieces(matrix, share):
        words = torch.frombuffer(matrix.codes.read(first, count), dtype=torch.uint8)
        bits = torch.frombuffer(matrix.scales.read(first, count), dtype=torch.int16)
        figures = _count(words, bits)
        if matrix.source_codes is not None and matrix.source_scales is not None:
            codes = torch.frombuffer(matrix.source_codes.read(first, count), dtype=torch.uint8)
            exponents = torch.frombuffer(matrix.source_scales.read(first, count), dtype=torch.uint8)
            figures, error = _compare(figures, words, bits, codes, exponents)
            groups += _worst_of(matrix, first, error, bits, keep)
        total += figures
    return total, worst(groups, keep)


def _pieces(matrix: Matrix, share: float) -> Iterator[tuple[int, int]]:
    """Yield (first row, count) of what is in work at a time."""
    step = max(1, PIECE // max(1, matrix.columns))
    for first, count in sampled_rows(matrix.rows, share) if matrix.columns else ():
        for start in range(first, first + count, step):
            yield start, min(step, first + count - start)


def _count(words: torch.Tensor, bits: torch.Tensor) -> Figures:
    """Count codes and scales; `words` are the bytes of int32 words, two codes plus 8 each."""
    pairs = torch.bincount(words, minlength=256).view(16, 16)
    codes = pairs.sum(0) + pairs.sum(1)
    kinds = (bits.int() >> 7) & (SIGNS * EXPONENTS - 1)
    scales = torch.bincount(kinds, minlength=SIGNS * EXPONENTS)
    return Figures(groups=len(bits), codes=tuple(codes.tolist()), scales=tuple(scales.tolist()))


@cache
def _tables() -> tuple[torch.Tensor, ...]:
    """Byte -> its two MXFP4 values in half units; its two int4 codes; and as a scale, half a unit.

    Two float32 lie in one float64, because torch copies single elements fastest.
    """
    every = torch.arange(256, dtype=torch.uint8)
    halves = naive.unpack_values(every[:, None]).view(256, 2).float()
    codes = torch.stack([every & 15, every >> 4], dim=1).float() - 8
    pairs = (two.contiguous().view(torch.float64).view(-1) for two in (halves, codes))
    return *pairs, dequant.scale_values(every) / 2


def _groups(table: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return the float32 values [G, 32] of bytes with two each."""
    return torch.index_select(table, 0, data.int()).view(torch.float32).view(-1, GROUP_SIZE)


def _compare(
    counted: Figures,
    words: torch.Tensor,
    bits: torch.Tensor,
    codes: torch.Tensor,
    exponents: torch.Tensor,
) -> tuple[Figures, torch.Tensor]:
    """Return counted figures with the errors, and the relative squared error of each group."""
    halves, signed, units = _tables()
    source = _groups(halves, codes)
    # In float64, so that no scale leaves the range. Byte 255 is no number.
    unit = torch.index_select(units, 0, exponents.int())
    scale = bits.view(torch.bfloat16).double()
    steps = (scale / unit).float()
    difference = _groups(signed, words).mul_(steps[:, None]).sub_(source)
    largest = difference.abs().amax(-1)
    squares, squared = source.square_().sum(-1), difference.square_().sum(-1)
    sound = squared.isfinite() & unit.isfinite()
    zero = squares == 0
    unused = (words.view(-1, GROUP_SIZE // 2) == ZERO_CODES).all(-1)
    relative = torch.where(zero & (squared == 0), 0.0, squared.double() / squares.double())
    relative[~sound] = torch.inf
    weight = unit[sound].square()
    figures = replace(
        counted,
        compared=len(bits),
        broken=int((~sound).sum()),
        exact=int(((largest == 0) & sound).sum()),
        zero=int(zero.sum()),
        collapsed=int((unused & ~zero).sum()),
        squared_error=float((squared[sound].double() * weight).sum()),
        squared_value=float((squares[sound].double() * weight).sum()),
        largest_error=float((largest[sound].double() * unit[sound]).max()) if sound.any() else 0.0,
    )
    return figures, relative


def _worst_of(
    matrix: Matrix, first_row: int, error: torch.Tensor, bits: torch.Tensor, keep: int
) -> list[Group]:
    values, places = torch.topk(error, min(keep, len(error)))
    in_row = matrix.columns // GROUP_SIZE
    scales = bits.view(torch.bfloat16)
    return [
        Group(value, matrix.name, first_row + place // in_row, place % in_row, float(scales[place]))
        for value, place in zip(values.tolist(), places.tolist(), strict=True)
        if value > 0
    ]
