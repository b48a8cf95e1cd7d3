# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""SiTU experts on a CPU: the values of MXFP4, the activation, and routing through a layer."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import (
    CPUSituExperts,
    CPUSituMxfp4Experts,
    expand_mxfp4,
    situ,
)
from vllm.model_executor.layers.fused_moe.oracle import mxfp4, unquantized

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_with_every_scale(dtype):
    """All 16 codes with all 256 scale bytes, bit for bit against float64."""
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    low, high = torch.arange(16).repeat(2), torch.arange(16).flip(0).repeat(2)
    codes = torch.empty(256, 16, dtype=torch.uint8)
    codes[:] = (low[:16] | (high[:16] << 4)).to(torch.uint8)
    values = torch.empty(32, dtype=torch.float64)
    values[0::2] = torch.tensor(E2M1, dtype=torch.float64)[low[:16]]
    values[1::2] = torch.tensor(E2M1, dtype=torch.float64)[high[:16]]
    exponent = torch.arange(256, dtype=torch.float64).view(256, 1) - 127
    exact = values * torch.exp2(exponent)
    exact[255] = float("nan")
    result = expand_mxfp4(codes, scales, dtype)
    assert result.shape == (256, 32)
    # Past the largest finite number (4 * 2^126 and up overflow at 2^127 and 2^128) both give inf.
    assert torch.equal(result[:255], exact[:255].to(dtype))
    assert result[255].isnan().all()


def test_situ_against_its_formula_in_float64():
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * 20
    gate, up = x.double().chunk(2, dim=-1)
    exact = 4.0 * torch.tanh(gate / 4.0) / (1 + torch.exp(-gate)) * 25.0 * torch.tanh(up / 25.0)
    # A dozen float32 roundings of values up to 100.
    torch.testing.assert_close(situ(x, 4.0, 25.0).double(), exact, rtol=2e-6, atol=1e-6)
    unbounded = 4.0 * torch.tanh(gate / 4.0) / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(situ(x, 4.0, None).double(), unbounded, rtol=2e-6, atol=1e-6)


def experts(cls, w1_scale=None, w2_scale=None):
    """An experts object without an engine: only what `apply` reads."""
    made = cls.__new__(cls)
    made.moe_config = SimpleNamespace(activation_situ_beta=4.0, activation_situ_linear_beta=25.0)
    made.quant_config = SimpleNamespace(w1_scale=w1_scale, w2_scale=w2_scale)
    return made


def run(layer, x, w1, w2, weights, ids, expert_map=None):
    output = torch.full_like(x, float("nan"))
    layer.apply(
        output,
        x,
        w1,
        w2,
        weights,
        ids,
        MoEActivation.SITU,
        8,
        expert_map,
        None,
        None,
        x,
        x,
        None,
        False,
    )
    return output


@pytest.fixture
def problem():
    """Five tokens, eight experts of which two are used by nobody, three a token."""
    g = torch.Generator().manual_seed(3)
    codes13 = torch.randint(0, 256, (8, 2 * 64, 32), generator=g, dtype=torch.uint8)
    codes2 = torch.randint(0, 256, (8, 64, 32), generator=g, dtype=torch.uint8)
    scale13 = torch.randint(121, 125, (8, 2 * 64, 2), generator=g, dtype=torch.uint8)
    scale2 = torch.randint(121, 125, (8, 64, 2), generator=g, dtype=torch.uint8)
    x = torch.randn(5, 64, generator=g)
    ids = torch.stack([torch.randperm(6, generator=g)[:3] for _ in range(5)]).to(torch.int32)
    weights = torch.rand(5, 3, generator=g)
    w1 = torch.stack(
        [expand_mxfp4(c, s, torch.float32) for c, s in zip(codes13, scale13, strict=True)]
    )
    w2 = torch.stack(
        [expand_mxfp4(c, s, torch.float32) for c, s in zip(codes2, scale2, strict=True)]
    )
    exact = torch.zeros(5, 64, dtype=torch.float64)
    for t in range(5):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            hidden = situ((x[t].double() @ w1[expert].double().T).unsqueeze(0), 4.0, 25.0)
            exact[t] += weight * (hidden.double() @ w2[expert].double().T)[0]
    packed = (codes13, codes2, scale13, scale2)
    return SimpleNamespace(x=x, ids=ids, weights=weights, w1=w1, w2=w2, exact=exact, packed=packed)


def close(actual, exact):
    # Two float32 products of 64 terms and a float32 activation: sqrt(64) * 2^-24 twice, and some.
    scale = exact.abs().max().item()
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=4e-6 * scale)


def test_plain_and_packed_experts_equal_the_sum_over_experts(problem):
    p = problem
    close(run(experts(CPUSituExperts), p.x, p.w1, p.w2, p.weights, p.ids), p.exact)
    codes13, codes2, scale13, scale2 = p.packed
    layer = experts(CPUSituMxfp4Experts, scale13, scale2)
    close(run(layer, p.x, codes13, codes2, p.weights, p.ids), p.exact)


def test_two_expert_parallel_ranks_add_up(problem):
    p = problem
    total = torch.zeros(5, 64)
    for first in (0, 4):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[first : first + 4] = torch.arange(4, dtype=torch.int32)
        mine = slice(first, first + 4)
        layer = experts(CPUSituExperts)
        total += run(layer, p.x, p.w1[mine], p.w2[mine], p.weights, p.ids, expert_map)
    close(total, p.exact)


def test_only_experts_in_use_are_expanded(problem):
    p = problem
    codes13, codes2, scale13, scale2 = p.packed
    used = set(p.ids.unique().tolist())
    layer = experts(CPUSituMxfp4Experts, scale13, scale2)
    asked = []
    expand = layer._expert
    layer._expert = lambda w1, w2, e, dtype: asked.append(e) or expand(w1, w2, e, dtype)
    run(layer, p.x, codes13, codes2, p.weights, p.ids)
    assert sorted(asked) == sorted(used)


def test_no_tokens(problem):
    p = problem
    out = run(experts(CPUSituExperts), p.x[:0], p.w1, p.w2, p.weights[:0], p.ids[:0])
    assert out.shape == (0, 64)


def test_router_weights_on_the_input_are_refused(problem):
    p = problem
    layer = experts(CPUSituExperts)
    with pytest.raises(NotImplementedError, match="apply_router_weight_on_input"):
        layer.apply(
            p.x,
            p.x,
            p.w1,
            p.w2,
            p.weights,
            p.ids,
            MoEActivation.SITU,
            8,
            None,
            None,
            None,
            p.x,
            p.x,
            None,
            True,
        )


@pytest.mark.parametrize(
    ("oracle", "backend", "added"),
    [
        (unquantized, unquantized.UnquantizedMoeBackend, CPUSituExperts),
        (mxfp4, mxfp4.Mxfp4MoeBackend, CPUSituMxfp4Experts),
    ],
    ids=["unquantized", "mxfp4"],
)
def test_upstreams_choice_ends_with_these_experts_and_only_on_a_cpu(oracle, backend, added):
    classes = oracle.backend_to_kernel_cls(backend.CPU)
    stock = oracle.backend_to_kernel_cls.__wrapped__(backend.CPU)
    assert classes == [*stock, added]
    assert not any(cls._supports_activation(MoEActivation.SITU) for cls in stock)
    assert not added._supports_activation(MoEActivation.SILU)
    assert added not in oracle.backend_to_kernel_cls(backend.XPU)


def test_weights_are_left_packed_for_situ_alone(problem):
    codes13, codes2, scale13, scale2 = (torch.nn.Parameter(x, False) for x in problem.packed)
    result = mxfp4.convert_weight_to_mxfp4_moe_kernel_format(
        mxfp4_backend=mxfp4.Mxfp4MoeBackend.CPU,
        layer=torch.nn.Module(),
        w13_weight=codes13,
        w2_weight=codes2,
        w13_weight_scale=scale13,
        w2_weight_scale=scale2,
        activation=MoEActivation.SITU,
    )
    assert [x if x is None else x.data_ptr() for x in result] == [
        *(x.data_ptr() for x in (codes13, codes2, scale13, scale2)),
        None,
        None,
    ]
