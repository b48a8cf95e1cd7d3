# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The definition's numbers: where they come from, and why "mse" is never worse than "absmax"."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from mxfp4_int4 import definition as d
from tests.mxfp4_int4.support.mxfp4_reference import E2M1


def bf16_of(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16)


def test_magnitudes_are_e2m1_in_half_units():
    assert [m / 2 for m in d.MAGNITUDES] == E2M1.tolist()


def test_floor_bits_are_the_bf16_of_a_millionth_over_seven():
    floor = torch.tensor(1e-6, dtype=torch.float32) / 7
    assert bf16_of(floor).view(torch.int16).item() == d.ABSMAX_FLOOR_BITS


@pytest.mark.parametrize("byte", range(254))
def test_absmax_scale_offset_and_floor_byte(byte):
    for index, m in enumerate(d.MAGNITUDES):
        if index >= d.OVERFLOW.get(byte, 8):
            continue
        amax = torch.tensor(m * 2.0 ** (byte - 128), dtype=torch.float64).float()
        under = bool(amax < torch.tensor(1e-6, dtype=torch.float32))
        assert under == (byte <= d.ABSMAX_FLOOR_BYTE[index]), (byte, m)
        if not under:
            bits = bf16_of(amax / 7).view(torch.int16).item()
            assert bits == 128 * byte + d.ABSMAX_SCALE_OFFSET[index]


@pytest.mark.parametrize("byte", [*range(90, 112), 127, 200])
def test_absmax_code_is_the_float_rule(byte):
    for largest, value in itertools.product(d.MAGNITUDES, d.MAGNITUDES):
        if value > largest:
            continue
        amax = torch.tensor(largest * 2.0 ** (byte - 128), dtype=torch.float64).float().clamp(1e-6)
        x = torch.tensor(value * 2.0 ** (byte - 128), dtype=torch.float64).float()
        expected = int((x * (7 / amax)).round().clamp(-7, 7))
        assert d.absmax_code(value, largest, byte) == expected
        assert d.absmax_code(-value, largest, byte) == -expected


def test_overflow_is_where_bf16_and_float32_end():
    for byte in range(255):
        for code, m in enumerate(E2M1):
            held = m * 2.0 ** (byte - 127) < 2.0**128
            assert held == (code < d.OVERFLOW.get(byte, 8))


def candidate_errors(value: int) -> dict[int, int]:
    return {c: d.candidate_error(value, c) for c in d.CANDIDATES}


def test_candidate_code_is_the_nearest_there_is():
    for value, c in itertools.product(range(-12, 13), d.CANDIDATES):
        best = min((128 * value - c * q) ** 2 for q in range(-8, 8))
        assert d.candidate_error(value, c) == best


def test_keys_fit_in_int32_with_their_candidate_number():
    worst = max(max(candidate_errors(s * m).values()) for m in d.MAGNITUDES for s in (1, -1))
    assert worst * 32 * 16 + 15 < 2**31
    assert len(d.CANDIDATES) <= 16


def absmax_errors(largest: int, byte: int) -> dict[int, Fraction]:
    """Error of "absmax" for each value of a group with this largest magnitude, in (half/128)^2."""
    if byte <= d.ABSMAX_FLOOR_BYTE[d.MAGNITUDES.index(largest)]:
        scale = Fraction(153, 128) * Fraction(2) ** (-23 - (byte - 128))
    else:
        bits = 128 * byte + d.ABSMAX_SCALE_OFFSET[d.MAGNITUDES.index(largest)]
        scale = Fraction(128 + bits % 128, 128) * Fraction(2) ** (bits // 128 - 127 - byte + 128)
    return {
        v: (128 * (v - scale * d.absmax_code(v, largest, byte))) ** 2
        for m in d.MAGNITUDES
        if m <= largest
        for v in (m, -m)
    }


@pytest.mark.parametrize("largest", [8, 12])
def test_one_candidate_is_as_good_as_absmax_at_every_value(largest):
    """The proof. Groups whose largest magnitude is 6 or less are exact at scale 1. In any other,
    for every byte, one candidate's error is at most that of "absmax" at each value, so its sum is
    too; the chosen candidate's sum is no larger, and fitting the scale only lowers it."""
    for byte in range(253):
        reference = absmax_errors(largest, byte)
        assert any(
            all(d.candidate_error(v, c) <= error for v, error in reference.items())
            for c in d.CANDIDATES
        ), byte


def test_groups_up_to_three_are_exact_at_one_candidate():
    assert all(d.candidate_error(s * m, 128) == 0 for m in (0, 1, 2, 3, 4, 6) for s in (1, -1))


def test_a_scale_that_holds_a_group_exactly_is_a_candidate():
    """All groups by which values occur: where any scale at all is exact, so is a candidate.

    s is exact for a set of values if v/s is an integer in -8..7 for each: s = value/q for the first
    of them, q in -8..7. Sets of up to three signed values decide it, as exactness at s = g/k, g the
    greatest common divisor, only needs g and the extremes; all sets of magnitudes are tried anyway.
    """
    values = [s * m for m in d.MAGNITUDES[1:] for s in (1, -1)]
    for size in (1, 2, 3, 4):
        for chosen in itertools.combinations(values, size):
            scales = {Fraction(chosen[0], q) for q in range(-8, 8) if q}
            possible = any(
                all((v / s).denominator == 1 and -8 <= v / s <= 7 for v in chosen) for s in scales
            )
            found = any(all(d.candidate_error(v, c) == 0 for v in chosen) for c in d.CANDIDATES)
            assert possible == found, chosen


def test_fit_never_raises_the_error_and_never_overflows():
    """The bf16 nearest to the least-squares scale: at least as good as the candidate it replaces,
    as candidates are bf16 themselves at every byte or a step apart from it; below 4 half units."""
    rng = np.random.default_rng(0)
    values = np.array([s * m for m in d.MAGNITUDES[1:] for s in (1, -1)])
    for _ in range(2000):
        counts = rng.multinomial(32, rng.dirichlet(np.full(14, 0.3)))
        totals = [
            sum(int(n) * d.candidate_error(int(v), c) for n, v in zip(counts, values, strict=True))
            for c in d.CANDIDATES
        ]
        c = d.CANDIDATES[totals.index(min(totals))]
        codes = [d.candidate_code(int(v), c) for v in values]
        fit = abs(sum(int(n * v * q) for n, v, q in zip(counts, values, codes, strict=True)))
        norm = sum(int(n * q * q) for n, q in zip(counts, codes, strict=True))
        assert norm <= fit < 4 * norm
        steps = 128 if fit < 2 * norm else 64
        scale = Fraction((2 * fit * steps + norm) // (2 * norm), steps) * (1 if c > 0 else -1)
        fitted = sum(
            int(n) * (int(v) - scale * q) ** 2
            for n, v, q in zip(counts, values, codes, strict=True)
        )
        assert fitted * 128**2 <= min(totals)


def test_the_least_error_of_any_group_is_bounded():
    """`lookup` adds up keys in float32, which is exact under 2^24. Whatever 32 values a group has,
    its least error is at most the weighted mean of the candidates' errors, which these weights
    (found by solving the game of group against candidate) bound by 13 half units squared."""
    weights = {256: 1, 384: 1, 192: 26, -192: 26, 200: 247, -200: 247, 219: 454}
    total = sum(weights.values())
    worst = max(
        sum(w * d.candidate_error(s * m, c) for c, w in weights.items())
        for m in d.MAGNITUDES
        for s in (1, -1)
    )
    assert 32 * worst < 13 * 128**2 * total
    assert 16 * 13 * 128**2 + 16 < 2**24
    # Fits: sum(v*q) of at most 32 * 12 * 8 below 4096, sum(q*q) of at most 32 * 64 above it.
    assert 32 * 12 * 8 < 4096
    assert 4096 * 32 * 64 + 4095 < 2**24
