# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The conversion step by step, as a framework does it without a kernel of its own: the baseline of
benchmarks/convert.py. Written from the documented steps, eight experts at a time, each step
one pass over memory; its result equals the "absmax" rule and is checked before it is timed."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def convert_step_by_step(
    weight: torch.Tensor, scale: torch.Tensor, chunk_experts: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight uint8 [E, N, K/2], scale uint8 [E, N, K/32] -> AITER's weight uint8 [E, N, K/2] and
    scale bfloat16, flat."""
    table = torch.tensor(E2M1, dtype=torch.float32, device=weight.device)
    weights, scales = [], []
    for start in range(0, len(weight), chunk_experts):
        packed = weight[start : start + chunk_experts]
        e, n, half = packed.shape
        g = half // 16
        # 1-4: nibbles, values, scales, bf16
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(e, n, g, 32)
        values = table[codes.int()]
        powers = torch.exp2(scale[start : start + chunk_experts].float() - 127)
        dense = (values * powers[..., None]).to(torch.bfloat16)
        # 5-8: f32, amax/7, codes. Times 7/amax: dividing by amax/7 in f32 breaks the ties at 3.5.
        wide = dense.float()
        amax = wide.abs().amax(-1, keepdim=True).clamp(min=1e-6)
        inverse = 7 / amax
        rounded = (wide * inverse).round().clamp(-7, 7).to(torch.int8)
        # 9-11: scales to bf16 [E, G, N], then pairs of groups
        stored = (amax / 7).squeeze(-1).transpose(1, 2).contiguous().to(torch.bfloat16)
        scales.append(stored.view(e, g // 2, 2, n).transpose(2, 3).contiguous().view(-1))
        # 12-15: shuffle rows, mask, interleave, pack
        tiles = rounded.view(e, n // 16, 16, g, 2, 16).permute(0, 1, 3, 4, 2, 5).contiguous()
        nibbles = (tiles & 15).view(torch.uint8).view(-1, 2, 4)
        weights.append((nibbles[:, 0] | (nibbles[:, 1] << 4)).view(e, n, half))
    return torch.cat(weights), torch.cat(scales)
