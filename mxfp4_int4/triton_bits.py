# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device functions of the fused kernel: one group of 32 codes a lane, as planes and as bytes.

A group is 16 bytes, four uint32 words of 8 codes. `to_planes` turns them into planes: bit 4*i + w
of plane p is bit p of code i of word w. Then a logic operation works on all 32 codes at once and
a population count counts codes. `look_up` turns a word into new codes, one a byte, by the byte
permutation that every GPU has. Never touches memory.
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
    """Four words of codes -> four bit planes, the signs last."""
    a: tl.constexpr = 0x55555555
    b: tl.constexpr = 0x33333333
    w0, w1 = _swap(w0, w1, 1, a)
    w2, w3 = _swap(w2, w3, 1, a)
    w0, w2 = _swap(w0, w2, 2, b)
    w1, w3 = _swap(w1, w3, 2, b)
    return w0, w1, w2, w3


# Which instruction permutes bytes. Triton's interpreter and other targets spell it out.
SPELLED, PRMT, V_PERM = (tl.constexpr(i) for i in range(3))
_LOW = tl.constexpr(0x07070707)


@triton.jit
def _prmt(low, high, selector):
    """NVIDIA: byte i of the result is byte s of the eight in `low`, `high`, where s is bits 0..2 of
    nibble i of the selector; with bit 3, its top bit eight times."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low, high, selector],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _v_perm(low, high, selector):
    """AMD: byte i of the result is byte s of the eight in `low`, `high`, where s, 0..7, is byte i
    of the selector. The instruction takes the upper four first."""
    return tl.inline_asm_elementwise(
        "v_perm_b32 $0, $1, $2, $3",
        "=v,v,v,v",
        [high, low, selector],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _pick(low, high, selector, INDEX: tl.constexpr):
    """Byte s of the eight in `low`, `high`, at its place INDEX; s is bits 0..2 of nibble INDEX."""
    s = (selector >> (4 * INDEX)) & 7
    byte = tl.where(s < 4, low >> (8 * (s & 3)), high >> (8 * (s & 3))) & 255
    return byte << (8 * INDEX)


@triton.jit
def _spelled(low, high, selector):
    """Four bytes by the low nibbles of the selector, whose bits 3 are not looked at."""
    first = _pick(low, high, selector, 0) | _pick(low, high, selector, 1)
    return first | _pick(low, high, selector, 2) | _pick(low, high, selector, 3)


@triton.jit
def _signs(word):
    """Bytes of ones where bit 3 of a low nibble of the word is set."""
    bits = (word & 8) | ((word & 0x80) << 4) | ((word & 0x800) << 8) | ((word & 0x8000) << 12)
    return (bits >> 3) * 255


@triton.jit
def look_up(word, above, below, PERMUTE: tl.constexpr):
    """Eight e2m1 codes -> two words of four bytes, in order: for each code the byte of its
    magnitude in `above`, or in `below` where it is negative (int64, bytes under 128)."""
    p0, p1 = above.to(tl.uint32), (above >> 32).to(tl.uint32)
    n0, n1 = below.to(tl.uint32), (below >> 32).to(tl.uint32)
    if PERMUTE == PRMT:
        sizes = word & 0x77777777
        # The top bit of 0x80, eight times where the code is negative; the others' is not used.
        ones = word * 0 + 0x80808080
        first, second = _prmt(ones, ones, word), _prmt(ones, ones, word >> 16)
        low, high = _prmt(p0, p1, sizes), _prmt(p0, p1, sizes >> 16)
        low = (low & ~first) | (_prmt(n0, n1, sizes) & first)
        high = (high & ~second) | (_prmt(n0, n1, sizes >> 16) & second)
    elif PERMUTE == V_PERM:
        odd = word >> 4
        first, second = ((word >> 3) & 0x01010101) * 255, ((odd >> 3) & 0x01010101) * 255
        even, odd = word & _LOW, odd & _LOW
        evens = (_v_perm(p0, p1, even) & ~first) | (_v_perm(n0, n1, even) & first)
        odds = (_v_perm(p0, p1, odd) & ~second) | (_v_perm(n0, n1, odd) & second)
        low = _v_perm(evens, odds, word * 0 + 0x05010400)
        high = _v_perm(evens, odds, word * 0 + 0x07030602)
    else:
        first, second = _signs(word), _signs(word >> 16)
        low = (_spelled(p0, p1, word) & ~first) | (_spelled(n0, n1, word) & first)
        high = _spelled(p0, p1, word >> 16) & ~second
        high |= _spelled(n0, n1, word >> 16) & second
    return low, high


@triton.jit
def aiter_word(low, high):
    """Codes v0..v3 and v4..v7, one a byte -> nibbles v0, v4, v1, v5, v2, v6, v3, v7."""
    return low | (high << 4)


@triton.jit
def packed_word(low, high):
    """Codes v0..v3 and v4..v7, one a byte -> nibbles v0, ..., v7."""
    low, high = low | (low >> 4), high | (high >> 4)
    low = (low & 0xFF) | ((low >> 8) & 0xFF00)
    high = ((high << 16) & 0xFF0000) | ((high << 8) & 0xFF000000)
    return low | high


@triton.jit
def int8_word(word):
    """Four nibbles in two's complement, one a byte -> four int8."""
    return word | ((word & 0x08080808) * 30)


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
