# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""AITER's group quantizer, as the contract describes it and golden files pin it."""

import torch


def per_1x32_i4_quant(weight):
    """bfloat16 [E, N, K] -> int8 codes [E, N, K] in -7..7, bfloat16 scale [E, K/32, N]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1).clamp(min=1e-6)
    scale = largest / 7
    # float64, because in the golden files ties fall as in exact arithmetic.
    codes = torch.round(7 * groups.double() / largest.double().unsqueeze(-1)).clamp(-7, 7)
    return codes.flatten(-2).to(torch.int8), scale.transpose(1, 2).contiguous().bfloat16()
