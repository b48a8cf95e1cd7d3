# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The layouts of the contract, step by step."""

import torch


def shuffle_weight(weight, layout):
    """int8 [E, N, K] -> the same bytes by 16 rows, group of 32, half, row, 16 values."""
    assert layout == (16, 16)
    experts, rows, width = weight.shape
    tiles = weight.view(experts, rows // 16, 16, width // 32, 2, 16)
    return tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(experts, rows, width)


def pack_int8_to_packed_int4(codes):
    """Every run v0..v7 -> the bytes v0|v4<<4, v1|v5<<4, v2|v6<<4, v3|v7<<4."""
    runs = codes.view(torch.uint8).view(-1, 2, 4) & 15
    return (runs[:, 0] | runs[:, 1] << 4).view(-1)


def shuffle_scale_for_int4(scale, group_size):
    """[E, G, N] -> [E, G/2, N, 2]."""
    assert group_size == 32
    experts, groups, rows = scale.shape
    return scale.view(experts, groups // 2, 2, rows).transpose(2, 3).contiguous()
