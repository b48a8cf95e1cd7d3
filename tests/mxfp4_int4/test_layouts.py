# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Where codes and scales lie, against compressed-tensors and against indices worked out one by one;
every output buffer is poisoned first."""

import importlib

import numpy as np
import pytest
import torch

from mxfp4_int4 import convert, dequantize
from mxfp4_int4.layouts import (
    scale_shape,
    weight_spec,
)
from tests.mxfp4_int4.support.mxfp4_reference import aiter_weight_index

# [E, N, K]: one group and one row where the layout allows it, odd group counts, K3's own K of w2 at
# TP8, rows that straddle blocks and tiles.
ANY = [(1, 1, 32), (2, 3, 96), (3, 5, 64), (1, 7, 160)]
AITER = [(1, 16, 64), (3, 32, 128), (2, 48, 384), (5, 16, 192), (1, 80, 320)]


def random_experts(shape: tuple[int, int, int], seed: int = 0):
    e, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (e, n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 253, (e, n, k // 32), generator=generator, dtype=torch.uint8)
    return weight, scale


def plain_by_definition(weight, scale, rule):
    return convert._convert(weight, scale, "plain", rule, 8, False, False, convert.NAIVE)


@pytest.mark.parametrize("shape", AITER, ids=str)
def test_aiter_value_by_value(shape, converted_by, scale_rule):
    e, n, k = shape
    weight, scale = random_experts(shape)
    plain = plain_by_definition(weight, scale, scale_rule)
    out = converted_by(weight, scale, layout="aiter", scale_rule=scale_rule)
    expected = np.zeros((e, n * k // 2), np.uint8)
    codes = plain.weight.numpy().astype(np.uint8) & 15
    for row in range(n):
        for column in range(k):
            byte, nibble = aiter_weight_index(row, column, k)
            expected[:, byte] |= codes[:, row, column] << (4 * nibble)
    assert np.array_equal(out.weight.view(e, -1).numpy(), expected)
    g = k // 32
    assert out.scale.shape == (e * n * g,)
    for expert in range(e):
        for row in range(n):
            for group in range(g):
                flat = ((expert * (g // 2) + group // 2) * n + row) * 2 + group % 2
                assert out.scale[flat] == plain.scale[expert, row, group]


@pytest.mark.parametrize("shape", ANY + AITER, ids=str)
def test_pack_quantized_is_compressed_tensors_own(shape, converted_by, scale_rule):
    pytest.importorskip("compressed_tensors")
    helpers = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")
    e, n, k = shape
    weight, scale = random_experts(shape, seed=1)
    plain = plain_by_definition(weight, scale, scale_rule)
    out = converted_by(weight, scale, layout="pack_quantized", scale_rule=scale_rule)
    assert torch.equal(out.scale, plain.scale)
    for expert in range(e):
        codes = helpers.unpack_from_int32(out.weight[expert], 4, torch.Size((n, k)))
        assert torch.equal(codes, plain.weight[expert])


@pytest.mark.parametrize("shape", ANY + AITER, ids=str)
def test_plain_and_dequantize(shape, converted_by, layout, scale_rule):
    """dequantize reads every layout: code times scale of the plain form, in float64."""
    if layout == "aiter" and shape in ANY:
        pytest.skip("aiter needs N % 16 == 0 and an even number of groups")
    e, n, k = shape
    weight, scale = random_experts(shape, seed=2)
    plain = plain_by_definition(weight, scale, scale_rule)
    out = converted_by(weight, scale, layout=layout, scale_rule=scale_rule)
    codes = plain.weight.view(e, n, k // 32, 32).double()
    expected = (codes * plain.scale.double()[..., None]).view(e, n, k)
    assert torch.equal(dequantize(out, layout, shape, torch.float64), expected)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(out, layout, shape, dtype), expected.to(dtype))


@pytest.mark.parametrize("shape", [(2, 48, 384), (1, 16, 64), (2, 7, 96)], ids=str)
def test_poisoned_buffers_are_written_whole_and_no_further(
    shape, layout, scale_rule, interpreted, compiled
):
    if layout == "aiter" and (shape[1] % 16 or shape[2] % 64):
        pytest.skip("aiter needs N % 16 == 0 and an even number of groups")
    weight, scale = random_experts(shape, seed=3)
    size, dtype = weight_spec(layout, shape)
    places = scale_shape(layout, shape)
    for implementation in (convert.LOOKUP, convert.NAIVE, compiled, interpreted):
        results = []
        for poison in (0x55, 0x2A):
            guard = 64
            weights = torch.full((np.prod(size) + guard,), poison, dtype=dtype)
            scales = torch.full((np.prod(places) + guard,), poison, dtype=torch.int16)
            fresh = weights[-guard:].clone(), scales[-guard:].clone()
            implementation.convert(
                weight,
                scale,
                layout,
                scale_rule,
                weights[:-guard].view(size),
                scales[:-guard].view(places),
            )
            assert torch.equal(weights[-guard:], fresh[0])
            assert torch.equal(scales[-guard:], fresh[1])
            results.append((weights[:-guard], scales[:-guard]))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_aiter_places_are_a_permutation():
    n, k = 48, 192
    seen = {aiter_weight_index(row, column, k) for row in range(n) for column in range(k)}
    assert seen == {(byte, nibble) for byte in range(n * k // 2) for nibble in (0, 1)}


@pytest.mark.parametrize("shape", [(1, 16, 64), (3, 16, 192), (1, 32, 384)], ids=str)
@pytest.mark.parametrize("layout_here", ["aiter", "pack_quantized"])
def test_the_tiles_of_a_real_launch(shape, layout_here, interpreted_as_launched):
    """Several tiles a program, partial ones, in place: the other tests interpret one wide tile."""
    weight, scale = random_experts(shape, seed=4)
    expected = convert._convert(weight, scale, layout_here, "mse", 8, False, False, convert.NAIVE)
    for in_place in (False, True):
        out = convert._convert(
            weight, scale, layout_here, "mse", 8, in_place, False, interpreted_as_launched
        )
        assert torch.equal(out.weight, expected.weight)
        assert torch.equal(out.scale, expected.scale)
