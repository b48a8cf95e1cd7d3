# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The fused MoE: packed int4 weights in the documented layout, one expert after another."""

import torch

from aiter import BUILD, ActivationType, QuantType, dtypes
from mxfp4_int4 import ConvertedExperts, dequantize

CALLS: list[dict] = []


def _values(weight, scale, expert, dtype):
    experts, rows, half = weight.shape
    one = ConvertedExperts(
        weight[expert : expert + 1].view(torch.uint8), scale.view(experts, -1)[expert]
    )
    return dequantize(one, "aiter", (1, rows, 2 * half))[0].to(dtype)


def fused_moe(
    hidden_states,
    w1,
    w2,
    topk_weight,
    topk_ids,
    expert_mask=None,
    activation=ActivationType.Silu,
    quant_type=QuantType.No,
    doweight_stage1=False,
    w1_scale=None,
    w2_scale=None,
    a1_scale=None,
    a2_scale=None,
    num_local_tokens=None,
    dtype=None,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
    moe_sorting_dispatch_policy=0,
    swiglu_limit=0.0,
    gate_mode="separated",
    beta=None,
    linear_beta=None,
):
    """Experts [T, K] -> [T, K] with packed int4 weights [E, N, K/2] and bfloat16 scales, flat."""
    CALLS.append({"w1": w1, "beta": beta, "linear_beta": linear_beta, "gate_mode": gate_mode})
    assert quant_type == QuantType.per_1x32
    assert w1.dtype == w2.dtype == dtypes.i4x2
    assert w1_scale.dtype == w2_scale.dtype == torch.bfloat16
    assert w1_scale.dim() == w2_scale.dim() == 1
    assert gate_mode == "separated"
    assert not doweight_stage1
    assert w1.shape[1] % 256 == 0
    assert w2.shape[1] % 128 == 0
    situ = BUILD != "without-act" and activation == ActivationType.Situv2
    local = torch.arange(topk_ids.max() + 1)
    if expert_mask is not None:
        mask = expert_mask[: len(local)].long()
        local = torch.where(mask > 0, mask.cumsum(0) - 1, -1)
    out = torch.zeros(hidden_states.shape)
    for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weight, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if local[expert] < 0:
                continue
            place = int(local[expert])
            w13 = _values(w1, w1_scale, place, hidden_states.dtype)
            gate, up = (w13 @ hidden_states[token]).float().chunk(2)
            if situ:
                hidden = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
                hidden = hidden * linear_beta * torch.tanh(up / linear_beta)
            else:
                hidden = gate * torch.sigmoid(gate) * up
            down = _values(w2, w2_scale, place, hidden_states.dtype)
            out[token] += weight * (down @ hidden.to(hidden_states.dtype)).float()
    return out.to(dtype or hidden_states.dtype)
