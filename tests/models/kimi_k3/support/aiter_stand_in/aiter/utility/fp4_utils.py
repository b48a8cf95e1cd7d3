# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 to float32, the first steps of upstream's own preparation of weights."""

import torch

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_to_f32(packed):
    """uint8 or float4 [..., K/2], the low nibble first -> float32 [..., K]."""
    table = torch.tensor([*_VALUES, *(-v for v in _VALUES)])
    packed = packed.view(torch.uint8)
    return table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()]


def e8m0_to_f32(scale):
    """2^(b-127)."""
    return torch.exp2(scale.view(torch.uint8).double() - 127).float()
