# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Int4 SiTU experts on a CPU: every byte of AITER's layout, and routing through a layer."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mxfp4_int4 import (
    ConvertedExperts,
    convert_experts,
    dequantize,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_situ_int4_moe import (
    CPUSituInt4Experts,
    expand_int4,
)
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32, kMxfp4Static

DATA = Path(__file__).parents[4] / "data"
GOLDEN = sorted(DATA.glob("aiter_int4_*.safetensors"))


@pytest.mark.parametrize(
    ("rows", "width"), [(16, 64), (32, 64), (16, 192), (48, 128), (768, 384)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_equal_the_conversions_own(rows, width, dtype):
    """Random bytes are all valid codes. One rounding of an exact product, in both."""
    g = torch.Generator().manual_seed(rows + width)
    codes = torch.randint(0, 256, (1, rows, width // 2), generator=g, dtype=torch.uint8)
    scales = torch.randn(rows * width // 32, generator=g).bfloat16()
    exact = dequantize(ConvertedExperts(codes, scales), "aiter", (1, rows, width), torch.float64)
    result = expand_int4(codes[0], scales, dtype)
    assert result.shape == (rows, width)
    # float16 cannot hold each bfloat16 scale: it is rounded before the product.
    if dtype == torch.float16:
        torch.testing.assert_close(result.double(), exact[0], rtol=2**-10, atol=2**-20)
    else:
        assert torch.equal(result, exact[0].to(dtype))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_values_of_golden_files(file):
    """AITER's own bytes mean AITER's own codes times its own scales."""
    golden = load_file(file)
    experts, rows, half = golden["weight_mxfp4"].shape
    scales = golden["absmax_scale"].transpose(1, 2).float()  # [E, G, N] -> [E, N, G]
    expected = golden["absmax_codes"].view(experts, rows, -1, 32).float() * scales.unsqueeze(-1)
    for expert in range(experts):
        result = expand_int4(
            golden["aiter_weight"].view(torch.uint8).view(experts, rows, half)[expert],
            golden["aiter_scale"].view(experts, -1)[expert],
            torch.float32,
        )
        assert torch.equal(result, expected[expert].flatten(1))


def make_experts(converted13, converted2):
    """An experts object without an engine: only what `apply` reads."""
    made = CPUSituInt4Experts.__new__(CPUSituInt4Experts)
    made.moe_config = SimpleNamespace(activation_situ_beta=4.0, activation_situ_linear_beta=25.0)
    made.quant_config = SimpleNamespace(w1_scale=converted13.scale, w2_scale=converted2.scale)
    return made


@pytest.mark.parametrize("local", [None, (4, 1, 6)], ids=["all-local", "expert-map"])
def test_routing_through_a_layer(local):
    """Each token's experts, weighted and summed, against float64; experts elsewhere add nothing."""
    g = torch.Generator().manual_seed(7)
    held = list(range(8)) if local is None else list(local)
    shapes = ((len(held), 2 * 64, 128), (len(held), 128, 64))
    converted = []
    for shape in shapes:
        codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), generator=g, dtype=torch.uint8)
        scale = torch.randint(119, 123, (*shape[:2], shape[2] // 32), generator=g).byte()
        converted.append(convert_experts(codes, scale, layout="aiter"))
    w13, w2 = (
        dequantize(one, "aiter", shape, torch.float64)
        for one, shape in zip(converted, shapes, strict=True)
    )
    expert_map = None
    if local is not None:
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[list(local)] = torch.arange(len(local), dtype=torch.int32)
    x = torch.randn(5, 128, generator=g)
    ids = torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(5)]).to(torch.int32)
    weights = torch.rand(5, 3, generator=g)

    exact = torch.zeros(5, 128, dtype=torch.float64)
    for t in range(5):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            if expert not in held:
                continue
            gate, up = (w13[held.index(expert)] @ x[t].double()).chunk(2)
            hidden = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
            exact[t] += weight * (w2[held.index(expert)] @ hidden)

    output = torch.full_like(x, float("nan"))
    experts = make_experts(*converted)
    arguments = (x, converted[0].weight, converted[1].weight, weights, ids, MoEActivation.SITU, 8)
    experts.apply(output, *arguments, expert_map, None, None, x, x, None, False)
    # float32 products of 128 and 64 terms and one activation: a few 2^-24 of the largest value.
    scale = exact.abs().max().item()
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=2e-6 * scale)
    assert experts.moe_problem_size(x, *arguments[1:3], ids) == (len(held), 5, 128, 128, 3)


def test_only_int4_weights_are_claimed():
    assert CPUSituInt4Experts._supports_quant_scheme(kInt4Static32, None)
    assert not CPUSituInt4Experts._supports_quant_scheme(kMxfp4Static, None)
    assert not CPUSituInt4Experts._supports_quant_scheme(None, None)


def test_missing_scales_are_named():
    experts = make_experts(*(ConvertedExperts(torch.empty(0), None) for _ in range(2)))
    with pytest.raises(ValueError, match="expected bfloat16 scales"):
        experts._expert(torch.empty(1), torch.empty(1), 0, torch.float32)


def test_upstreams_choice_never_takes_them():
    """Without the flag the CPU's list is what it was: int4 experts come through the flag alone."""
    assert CPUSituInt4Experts not in mxfp4.backend_to_kernel_cls(mxfp4.Mxfp4MoeBackend.CPU)
    assert mxfp4._MXFP4_SCHEME_CANDIDATES.count((kInt4Static32, None)) == 1
    assert mxfp4._MXFP4_SCHEME_CANDIDATES[-1] == (kInt4Static32, None)
