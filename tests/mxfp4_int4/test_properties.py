# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Properties of the conversion on inputs that hypothesis makes up."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4_int4 import convert
from tests.mxfp4_int4.support.mxfp4_reference import VALUES, brute_force, experts, normalized_error

# A group as the codes it is made of and how often each occurs, so that rare mixtures are common.
GROUPS = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 31)), min_size=1, max_size=6).map(
    lambda parts: np.resize(np.concatenate([[code] * times for code, times in parts]), 32)
)
BYTES = st.one_of(st.integers(0, 252), st.sampled_from([0, 1, 2, 104, 105, 106, 107, 108]))
SETTINGS = settings(max_examples=60, deadline=None)


def converted(codes: np.ndarray, byte: int, rule: str = "mse", implementation=None):
    """Codes int8 [32] and scale as float64 of one group."""
    weight, scale, _ = experts(codes[None], byte)
    out = convert._convert(weight, scale, "plain", rule, 8, False, False, implementation)
    return out.weight[0, 0, :32].numpy(), out.scale.flatten()[:1].double().numpy()


def error(codes: np.ndarray, byte: int, rule: str = "mse") -> float:
    new, scale = converted(codes, byte, rule)
    return float(normalized_error(codes[None], np.array([byte]), new[None], scale)[0])


@SETTINGS
@given(GROUPS, BYTES)
def test_between_brute_force_and_absmax(codes, byte):
    ours, best = error(codes, byte), float(brute_force(codes[None], byte)[0])
    assert ours <= error(codes, byte, "absmax")
    assert ours >= best - 1e-12 * (VALUES[codes] ** 2).sum()
    if best == 0:
        assert ours == 0


@SETTINGS
@given(GROUPS, BYTES, st.permutations(range(32)))
def test_order_within_a_group_does_not_matter(codes, byte, order):
    new, scale = converted(codes, byte)
    permuted, same_scale = converted(codes[list(order)], byte)
    assert same_scale == scale
    assert np.array_equal(permuted, new[list(order)])


@SETTINGS
@given(GROUPS, BYTES)
def test_negated_groups_have_the_same_error(codes, byte):
    assert error(codes ^ 8, byte) == error(codes, byte)


@SETTINGS
@given(GROUPS, st.integers(2, 250))
def test_the_byte_only_moves_the_exponent(codes, byte):
    new, scale = converted(codes, byte)
    same_new, doubled = converted(codes, byte + 1)
    assert np.array_equal(new, same_new)
    assert doubled == 2 * scale


@SETTINGS
@given(GROUPS, BYTES, st.sampled_from(["mse", "absmax"]))
def test_the_cpu_paths_are_the_definition(compiled, codes, byte, rule):
    slow = converted(codes, byte, rule, convert.NAIVE)
    for implementation in (convert.LOOKUP, compiled):
        fast = converted(codes, byte, rule, implementation)
        assert np.array_equal(fast[0], slow[0])
        assert fast[1] == slow[1]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 7),
    st.sampled_from(["mse", "absmax"]),
    st.sampled_from(["aiter", "pack_quantized", "plain"]),
    st.integers(0, 2**32 - 1),
)
def test_any_shape_equals_the_definition(compiled, e, n, g, rule, layout, seed):
    if layout == "aiter":
        n, g = 16 * (n // 8 + 1), 2 * g
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (e, n, 16 * g), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 253, (e, n, g), generator=generator, dtype=torch.uint8)
    slow = convert._convert(weight, scale, layout, rule, 8, False, True, convert.NAIVE)
    for implementation in (convert.LOOKUP, compiled):
        fast = convert._convert(weight, scale, layout, rule, 8, False, True, implementation)
        assert torch.equal(fast.weight, slow.weight)
        assert torch.equal(fast.scale.view(torch.int16), slow.scale.view(torch.int16))
        assert fast.stats == slow.stats
