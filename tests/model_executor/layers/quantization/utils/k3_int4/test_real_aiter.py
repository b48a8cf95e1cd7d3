# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One layer of experts through a real AITER on a gfx942 GPU, by the engine's own hand-over, beside
what the torch experts define. Skipped, with the reason, where there is none."""

import importlib.util
import inspect

import pytest
import torch

from tests.models.kimi_k3.support.simulated_gpu.int4_support import (
    INT4,
    build_layer,
    draw_experts,
    load_experts,
    make_config,
    packed_quant,
    rank_of,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_situ_int4_moe import expand_int4
from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import situ
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.model_executor.layers.quantization.utils.k3_int4 import aiter, facts, policy
from vllm.utils.torch_utils import set_default_torch_dtype

EXPERTS, TOP_K = 8, 2
# AITER's tiles: 2 * inner of stage 1 by 256, hidden of stage 2 by 128.
HIDDEN, INNER = 512, 384
BETA, LINEAR_BETA = 4.0, 25.0
# Unit roundoff of bfloat16, to which both sides round.
U = 2.0**-8
LIKELY = 7.0


@pytest.fixture
def real_aiter():
    if importlib.util.find_spec("aiter") is None:
        pytest.skip("no AITER in this environment")
    machine = facts.machine()
    if machine.architecture != policy.Target.GFX942:
        pytest.skip(f"needs a gfx942 GPU, found {machine.architecture or machine.platform}")
    usable = aiter.look(inside=True)
    if not usable.fused_moe:
        pytest.skip("AITER's fused MoE is switched off: set VLLM_ROCM_USE_AITER=1")
    if usable.fault:
        pytest.skip(usable.fault)


def reference(layer, x, ids, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output in float64 and, for each element, a bound of what bfloat16 may do to it.

    A weight is code times scale rounded to bfloat16, off by at most U of itself, independently.
    A sum of n independent errors of at most c_i passes 7 sqrt(sum c_i^2) once in 10^10 (Hoeffding);
    accumulating in float32 adds n 2^-24, which is nothing beside it. Either stage rounds its result
    to bfloat16, U of it. SiTU moves by at most 1.1 (|d gate| |up| + |gate| |d up|). The sum over
    experts is rounded once more. Sums of magnitudes in place of the roots would allow anything.
    """
    w13, w2 = (
        [
            expand_int4(codes[e].cpu(), scale.cpu().view(EXPERTS, -1)[e], torch.float32).double()
            for e in range(EXPERTS)
        ]
        for codes, scale in (
            (layer.w13_weight.view(torch.uint8), layer.w13_weight_scale),
            (layer.w2_weight.view(torch.uint8), layer.w2_weight_scale),
        )
    )
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    bound = torch.zeros_like(out)
    for token, slot in ((t, s) for t in range(len(x)) for s in range(TOP_K)):
        expert, weight = int(ids[token, slot]), float(weights[token, slot])
        row = x[token].double()
        both = w13[expert] @ row
        size = LIKELY * U * (w13[expert].square() @ row.square()).sqrt() + U * both.abs()
        (gate, up), (d_gate, d_up) = both.chunk(2), size.chunk(2)
        hidden = situ(both.float()[None], BETA, LINEAR_BETA)[0].double()
        d_hidden = 1.1 * (d_gate * (up.abs() + d_up) + gate.abs() * d_up) + U * hidden.abs()
        part, squares = w2[expert] @ hidden, w2[expert].square()
        own = LIKELY * U * (squares @ (hidden.abs() + d_hidden).square()).sqrt()
        error = own + (squares @ d_hidden.square()).sqrt()
        out[token] += weight * part
        bound[token] += weight * (error + U * part.abs())
    return out, bound + U * out.abs()


def check_layer(device: torch.device, packed: bool, tokens: int) -> torch.dtype:
    """Load a layer, hand it over to its kernel, hold the result to the reference."""
    config = make_config(None if packed else INT4)
    config.model_config.dtype = torch.bfloat16
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, TOP_K, generator=g)
    with rank_of(config):
        with set_default_torch_dtype(torch.bfloat16), device:
            layer = build_layer(
                experts=EXPERTS,
                hidden=HIDDEN,
                inner=INNER,
                beta=BETA,
                linear_beta=LINEAR_BETA,
                quant=packed_quant if packed else Mxfp4Config,
            )
        layer.to(device)
        load_experts(layer, draw_experts(EXPERTS, HIDDEN, INNER), "mse" if packed else None)
        layer.quant_method.process_weights_after_loading(layer)
        experts = layer.quant_method.moe_kernel.fused_experts
        out = torch.full_like(x, torch.nan, device=device)
        given = {
            "output": out,
            "hidden_states": x.to(device),
            "w1": layer.w13_weight,
            "w2": layer.w2_weight,
            "topk_weights": weights.to(device),
            "topk_ids": ids.to(device),
            "activation": MoEActivation.SITU,
            "global_num_experts": EXPERTS,
            "apply_router_weight_on_input": False,
        }
        rest = inspect.signature(experts.apply).parameters.keys() - given.keys()
        experts.apply(**given, **dict.fromkeys(rest))
    expected, bound = reference(layer, x, ids, weights)
    assert ((out.cpu().double() - expected).abs() <= bound).all()
    # The bound says something.
    assert float(bound.mean()) < 0.5 * float(expected.abs().mean())
    return layer.w13_weight.dtype


@pytest.mark.parametrize("packed", [False, True], ids=["flag", "checkpoint"])
def test_the_torch_experts_are_within_the_bound(packed):
    """The same on a CPU, in bfloat16: the reference and its bound hold for them."""
    check_layer(torch.device("cpu"), packed, 4)


@pytest.mark.gpu
@pytest.mark.usefixtures("real_aiter")
@pytest.mark.parametrize("packed", [False, True], ids=["flag", "checkpoint"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_aiter_computes_what_the_torch_experts_define(packed, tokens):
    dtype = check_layer(torch.device("cuda"), packed, tokens)
    assert dtype == aiter.weight_dtype()
