# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Byte permutations of GPUs, spelled out from their manuals (NVIDIA's PTX ISA, `prmt`; AMD's CDNA3
ISA, `V_PERM_B32`) for Triton's interpreter, which runs no assembly."""

import triton
import triton.language as tl


@triton.jit
def _byte(low, high, index):
    return tl.where(index < 4, low >> (8 * (index & 3)), high >> (8 * (index & 3))) & 255


@triton.jit
def _prmt_byte(low, high, selector, INDEX: tl.constexpr):
    nibble = (selector >> (4 * INDEX)) & 15
    byte = _byte(low, high, nibble & 7)
    byte = tl.where(nibble >= 8, (byte >> 7) * 255, byte)
    return byte << (8 * INDEX)


@triton.jit
def prmt(low, high, selector):
    """As `triton_bits._prmt`: bits 16.. of the selector are not looked at."""
    result = _prmt_byte(low, high, selector, 0) | _prmt_byte(low, high, selector, 1)
    return result | _prmt_byte(low, high, selector, 2) | _prmt_byte(low, high, selector, 3)


@triton.jit
def _v_perm_byte(low, high, selector, INDEX: tl.constexpr):
    # From 8 on a selector names signs and constants; 255 shows that none was meant to be used.
    index = (selector >> (8 * INDEX)) & 255
    return tl.where(index < 8, _byte(low, high, index & 7), 255) << (8 * INDEX)


@triton.jit
def v_perm(low, high, selector):
    """As `triton_bits._v_perm`."""
    result = _v_perm_byte(low, high, selector, 0) | _v_perm_byte(low, high, selector, 1)
    return result | _v_perm_byte(low, high, selector, 2) | _v_perm_byte(low, high, selector, 3)
