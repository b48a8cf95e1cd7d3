# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Attention residuals in torch against their definition, written out per token in float64."""

import pytest
import torch

from vllm.models.kimi_k3.cpu.attn_res import attn_res


def definition(prefix, delta, blocks, norm, direction, out_norm, num_blocks, eps, out_eps):
    """One token at a time: scores of normalized sources, softmax, weighted mean, normalization."""
    prefix = prefix.double() + (0 if delta is None else delta.double())
    rows = []
    for t in range(prefix.shape[0]):
        sources = [*blocks[t, :num_blocks].double(), prefix[t]]
        scores = torch.stack(
            [
                (s / (s.square().mean() + eps).sqrt() * norm.double() * direction.double()).sum()
                for s in sources
            ]
        )
        weights = scores.exp() / scores.exp().sum()
        mixed = sum(w * s for w, s in zip(weights, sources, strict=True))
        if out_norm is not None:
            mixed = mixed / (mixed.square().mean() + out_eps).sqrt() * out_norm.double()
        rows.append(mixed)
    return torch.stack(rows), prefix


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
@pytest.mark.parametrize("has_delta", [False, True], ids=["sum", "sum+delta"])
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normalized"])
def test_mixture_prefix_and_block(num_blocks, has_delta, has_norm):
    g = torch.Generator().manual_seed(num_blocks)
    prefix, delta = torch.randn(5, 32, generator=g), torch.randn(5, 32, generator=g)
    blocks = torch.full((5, 4, 32), float("nan"))
    blocks[:, :num_blocks] = torch.randn(5, num_blocks, 32, generator=g)
    norm, direction, out_norm = (torch.randn(32, generator=g) for _ in range(3))
    delta = delta if has_delta else None
    out_norm = out_norm if has_norm else None
    exact, exact_prefix = definition(
        prefix, delta, blocks, norm, direction, out_norm, num_blocks, 1e-5, 1e-6
    )
    out = attn_res(
        prefix, delta, blocks, norm, direction, out_norm, num_blocks, num_blocks, 1e-5, 1e-6
    )
    # Sums of 32 products in float32, a softmax and two roots: a few parts in 2^24 each.
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(prefix.double(), exact_prefix, rtol=1e-7, atol=1e-7)
    assert torch.equal(blocks[:, num_blocks], prefix)
    assert blocks[:, num_blocks + 1 :].isnan().all()


def test_bfloat16_rounds_the_prefix_before_it_is_a_source():
    prefix = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    delta = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    blocks = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    ones = torch.ones(2, dtype=torch.bfloat16)
    out = attn_res(prefix, delta, blocks, ones, ones, None, 0, -1, 1e-5, 0.0)
    # 257 is no bfloat16 number; the tie goes to the even 256.
    assert prefix.tolist() == [[256.0, 1.0]]
    assert out.tolist() == [[256.0, 1.0]]
    assert out.dtype == torch.bfloat16


def test_no_tokens():
    empty = torch.zeros(0, 8)
    ones = torch.ones(8)
    assert attn_res(
        empty, None, torch.zeros(0, 2, 8), ones, ones, ones, 2, -1, 1e-5, 1e-5
    ).shape == (
        0,
        8,
    )


def test_quantized_output_is_refused():
    x = torch.zeros(1, 8)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        attn_res(
            x,
            None,
            x.unsqueeze(1),
            x[0],
            x[0],
            None,
            0,
            -1,
            1e-5,
            0.0,
            quant_dtype=torch.float8_e4m3fn,
        )
