# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The definition of the conversion of one group, in plain integer torch. It is what every other
implementation must equal bit for bit, and is never meant to be fast."""

import torch

from .definition import (
    ABSMAX_FLOOR_BITS,
    ABSMAX_FLOOR_BYTE,
    ABSMAX_SCALE_OFFSET,
    CANDIDATES,
    GROUP_SIZE,
    MAGNITUDES,
)
from .layouts import pack_codes, place_scales


def unpack_values(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., P], two e2m1 codes a byte, low nibble first -> int64 [..., 2P] in half units."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=packed.device)
    return table[codes]


def quantize_mse(packed: torch.Tensor, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """packed uint8 [R, 16], byte uint8 [R] -> codes int8 [R, 32], bf16 scale bits int32 [R].

    1. Round the values to codes at each candidate scale; keep the candidate with the least
       squared error, the first one of equals.
    2. Fit the scale to the codes: the least-squares scale sum(v*q) / sum(q*q), rounded to the
       nearest that bf16 holds at this byte, halves away from zero. The codes stay.
    """
    values = unpack_values(packed)  # half units
    candidates = torch.tensor(CANDIDATES, device=packed.device)[:, None, None]
    size = (256 * values.abs() + candidates.abs()) // (2 * candidates.abs())
    codes = (size * values.sign() * candidates.sign()).clamp(-8, 7)  # [C, R, 32]
    error = (128 * values - candidates * codes).square().sum(-1)  # [C, R]
    best = error.min(0).values
    first = (error == best).long().argmax(0)  # argmax of 0/1: the first candidate of equals
    rows = torch.arange(len(packed), device=packed.device)
    codes = codes[first, rows]
    negative = torch.tensor(CANDIDATES, device=packed.device)[first] < 0

    fit = (values * codes).sum(-1).abs()
    norm = codes.square().sum(-1)
    empty = norm == 0  # a group of zeros: its scale is one half unit
    fit, norm = torch.where(empty, 1, fit), torch.where(empty, 1, norm)
    # bf16 steps: 1/128 half unit under a scale of 2, else 1/64; subnormals at bytes 0 and 1
    # step by 1/32 and 1/64. step = 1 / (32 * 2^j); bits = mantissa + 128 * (byte - j).
    j = torch.minimum(byte.long(), torch.where(fit < 2 * norm, 2, 1))
    mantissa = (2 * fit * (32 << j) + norm) // (2 * norm)
    bits = mantissa + 128 * (byte.long() - j) + 0x8000 * negative
    return codes.to(torch.int8), bits.to(torch.int32)


def quantize_absmax(packed: torch.Tensor, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Same shapes as `quantize_mse`. AITER's rule bit for bit, in integers: scale amax/7 with amax
    at least 1e-6, codes rounded with that scale (half to even) before it is stored as bf16. Groups
    whose values are much under 1e-6 collapse to zero; kept so, for comparison only."""
    values = unpack_values(packed)
    largest = values.abs().amax(-1)
    index = torch.searchsorted(torch.tensor(MAGNITUDES, device=packed.device), largest)
    floor = byte.long() <= torch.tensor(ABSMAX_FLOOR_BYTE, device=packed.device)[index]

    shift = torch.where(largest > 0, (122 - byte.long()).clamp(0, 40), 40)[:, None]
    under = (2 * 109375 * values.abs() + (1 << shift)) >> (shift + 1)
    above = (14 * values.abs() + largest[:, None]) // (2 * largest[:, None].clamp(min=1))
    codes = torch.where(floor[:, None], under, above) * values.sign()

    bits = 128 * byte.long() + torch.tensor(ABSMAX_SCALE_OFFSET, device=packed.device)[index]
    bits = torch.where(floor, ABSMAX_FLOOR_BITS, bits)
    return codes.to(torch.int8), bits.to(torch.int32)


def convert_slab(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    """Convert uint8 [E, N, K/2] and uint8 [E, N, G] into buffers shaped as `layouts` says; the
    scale buffer is int16 (bf16 bits)."""
    e, n, g = scale.shape
    quantize = quantize_mse if scale_rule == "mse" else quantize_absmax
    codes, bits = quantize(weight.reshape(-1, GROUP_SIZE // 2), scale.reshape(-1))
    out_weight.copy_(pack_codes(codes.view(e, n, g * GROUP_SIZE), layout))
    out_scale.copy_(place_scales(bits.view(e, n, g).to(torch.int16), layout))
