# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Device functions of the fused kernel: one group of 32 codes a lane, as four bit planes.

A group is 16 bytes, four uint32 words of 8 codes. `to_planes` turns them into planes: bit 4*i + w
of plane p is bit p of code i of word w. Then a logic operation works on all 32 codes at once and
a population count counts codes. Never touches memory.
"""

import triton
import triton.language as tl


@triton.jit
def popcount(x):
    """Set bits of a uint32, in the form that LLVM turns into one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _swap(a, b, shift: tl.constexpr, mask: tl.constexpr):
    """Bits of a outside the mask <-> bits of b inside it, `shift` apart."""
    rest: tl.constexpr = 0xFFFFFFFF ^ mask
    low = (a & mask) | ((b << shift) & rest)
    high = ((a >> shift) & mask) | (b & rest)
    return low, high


@triton.jit
def to_planes(w0, w1, w2, w3):
    """Four words of codes <-> four bit planes; its own inverse."""
    a: tl.constexpr = 0x55555555
    b: tl.constexpr = 0x33333333
    w0, w1 = _swap(w0, w1, 1, a)
    w2, w3 = _swap(w2, w3, 1, a)
    w0, w2 = _swap(w0, w2, 2, b)
    w1, w3 = _swap(w1, w3, 2, b)
    return w0, w1, w2, w3


@triton.jit
def _spread(sizes, m, bit: tl.constexpr, index: tl.constexpr):
    """The mask m where the code of magnitude `index` has this bit, else 0."""
    return m & ((sizes << (31 - 4 * index - bit)).to(tl.int32, bitcast=True) >> 31).to(
        tl.uint32, bitcast=True
    )


@triton.jit
def code_planes(sizes, negative, m1, m2, m3, m4, m5, m6, m7, SMALL: tl.constexpr):
    """Planes of the two's complement codes.

    sizes: uint32, |code| of magnitude index i at bits 4i..4i+3; negative: plane of the codes below
    zero if not zero; m1..m7: planes of the magnitudes. |code| 8 is -8 below zero, else 7.
    SMALL: no code is larger than its magnitude in half units (so the first ones lack high bits).
    """
    q0 = _spread(sizes, m1, 0, 1) | _spread(sizes, m2, 0, 2) | _spread(sizes, m3, 0, 3)
    q0 |= _spread(sizes, m4, 0, 4) | _spread(sizes, m5, 0, 5) | _spread(sizes, m6, 0, 6)
    q0 |= _spread(sizes, m7, 0, 7)
    q1 = _spread(sizes, m2, 1, 2) | _spread(sizes, m3, 1, 3) | _spread(sizes, m4, 1, 4)
    q1 |= _spread(sizes, m5, 1, 5) | _spread(sizes, m6, 1, 6) | _spread(sizes, m7, 1, 7)
    q2 = _spread(sizes, m4, 2, 4) | _spread(sizes, m5, 2, 5) | _spread(sizes, m6, 2, 6)
    q2 |= _spread(sizes, m7, 2, 7)
    if not SMALL:
        q1 |= _spread(sizes, m1, 1, 1)
        q2 |= _spread(sizes, m1, 2, 1) | _spread(sizes, m2, 2, 2) | _spread(sizes, m3, 2, 3)
    q3 = _spread(sizes, m6, 3, 6) | _spread(sizes, m7, 3, 7)
    clamped = q3 & ~negative
    q0, q1, q2 = q0 | clamped, q1 | clamped, q2 | clamped
    any01 = q0 | q1
    r1 = q1 ^ (negative & q0)
    r2 = q2 ^ (negative & any01)
    r3 = negative & (any01 | q2 | q3)
    return q0, r1, r2, r3


@triton.jit
def aiter_word(w):
    """Eight nibbles v0..v7 -> v0, v4, v1, v5, v2, v6, v3, v7, lowest first: swap the middle bytes,
    then the middle nibbles of each half."""
    t = (w ^ (w >> 8)) & 0x0000FF00
    w = w ^ t ^ (t << 8)
    t = (w ^ (w >> 4)) & 0x00F000F0
    return w ^ t ^ (t << 4)


@triton.jit
def divide(numerator, denominator):
    """Floor of the quotient of two int32 in 0..2^22 by way of float32, whatever its division rounds
    to within 2 units in the last place: the remainder puts the quotient right."""
    quotient = (numerator.to(tl.float32) / denominator.to(tl.float32)).to(tl.int32)
    rest = numerator - quotient * denominator
    return quotient + tl.where(rest >= denominator, 1, 0) - tl.where(rest < 0, 1, 0)


@triton.jit
def join_words(low, high):
    """Two words -> one int64."""
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit
def plain_words(w):
    """Eight nibbles -> int64 of eight int8."""
    low, high = w & 0xFFFF, w >> 16
    low = (low | (low << 8)) & 0x00FF00FF
    high = (high | (high << 8)) & 0x00FF00FF
    low = (low | (low << 4)) & 0x0F0F0F0F
    high = (high | (high << 4)) & 0x0F0F0F0F
    return join_words(low | ((low & 0x08080808) * 30), high | ((high & 0x08080808) * 30))
