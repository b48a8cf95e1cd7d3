# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The numbers that both scale rules are made of, for one group of 32 MXFP4 codes.

Everything is an integer. Values are in half units: the e2m1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6
are 0, 1, 2, 3, 4, 6, 8, 12 half units of 2^(b-128), b being the group's e8m0 byte. A candidate
scale is a numerator over 128. The reasons are in docs/conversion.md. This module holds no
tensors and never touches data: every implementation builds its tables from it.
"""

GROUP_SIZE = 32  # values that share a scale, along K
GROUP_BYTES = GROUP_SIZE // 2  # of packed codes
MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # half units, by e2m1 code 0..7 (code bit 3: the sign)
SIGNED = (*MAGNITUDES, *(-m for m in MAGNITUDES))  # by e2m1 code

# Candidate scales of the "mse" rule in half units / 128, in the order that breaks ties.
#   1, 2, 3              every group that some scale holds exactly is exact at +1, -1, 2 or 3
#   3/2, 11/8, 25/16     where 6.0 (12 half units) becomes code 8: -8 on one side, 7 on the other
#   219, 146             the bf16 of 12/7 and 8/7, which are the scales of the "absmax" rule
#   153                  the bf16 of 1e-6/7 at byte 105: what "absmax" stores where it clamps
CANDIDATES = (128, -128, 256, 384, 192, -192, 176, -176, 200, -200, 219, 146, 153)

KEY = 16  # the candidate with the least KEY * error + number is chosen

# The "absmax" rule: amax is raised to at least 1e-6. 1e-6 / 7 as bf16 is 153/128 * 2^-23.
ABSMAX_FLOOR_BITS = 0x3419
# For each magnitude, the largest byte at which that magnitude is under 1e-6.
ABSMAX_FLOOR_BYTE = (255, 108, 107, 106, 106, 105, 105, 104)
# The bytes for which the codes under the floor differ.
FLOOR_BYTES = range(100, 109)
# bf16 of amax/7 is 219 or 146 (over 128) times a power of two: bits = 128 * byte + this.
ABSMAX_SCALE_OFFSET = tuple(
    0
    if not m
    else (219 if m % 3 == 0 else 146) - 128 * {12: 2, 6: 3, 3: 4, 8: 2, 4: 3, 2: 4, 1: 5}[m]
    for m in MAGNITUDES
)

# From this byte on, this e2m1 magnitude index and every larger one is 2^128 or more, which
# neither bf16 nor f32 holds.
OVERFLOW = {253: 6, 254: 4}


def candidate_code(value: int, numerator: int) -> int:
    """The int4 code of `value` (half units) at the scale `numerator`/128: the nearest one, halves
    away from zero, then clamped to -8..7."""
    size = (256 * abs(value) + abs(numerator)) // (2 * abs(numerator))
    code = size if (value < 0) == (numerator < 0) else -size
    return max(-8, min(7, code))


def candidate_error(value: int, numerator: int) -> int:
    """Squared error of `value` at `numerator`/128, in units of (half unit / 128)^2."""
    return (128 * value - numerator * candidate_code(value, numerator)) ** 2


def absmax_code(value: int, largest: int, byte: int) -> int:
    """The "absmax" code of `value`, where `largest` is the group's largest magnitude (half units).

    With f = value * 2^(byte-128) it is round(f / (max(amax, 1e-6) / 7)). Above the floor that
    is 7*value/largest, whose only ties are 3.5 -> 4, half to even. Under it, it is
    value * 7e6 * 2^(byte-128) = value * 109375 / 2^(122-byte), which has no ties within -7..7.
    """
    if largest == 0 or byte <= ABSMAX_FLOOR_BYTE[MAGNITUDES.index(largest)]:
        shift = min(122 - byte, 40) if largest else 40
        size = (2 * 109375 * abs(value) + (1 << shift)) >> (shift + 1)
    else:
        size = (14 * abs(value) + largest) // (2 * largest)
    return -size if value < 0 else size


def mse_maps() -> list[dict[int, int]]:
    """Value (half units) to code, by candidate."""
    return [{v: candidate_code(v, c) for v in SIGNED} for c in CANDIDATES]


def absmax_maps() -> list[dict[int, int]]:
    """Value to code, by largest magnitude above the floor, then by byte (FLOOR_BYTES) under it."""

    def code_map(largest: int, byte: int) -> dict[int, int]:
        return {v: absmax_code(v, largest, byte) for v in SIGNED if abs(v) <= largest}

    maps = [code_map(m, 200) for m in MAGNITUDES]
    for byte in FLOOR_BYTES:
        sizes = [m for m, top in zip(MAGNITUDES, ABSMAX_FLOOR_BYTE, strict=True) if byte <= top]
        maps.append(code_map(max(sizes), byte))
    return maps
