# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The statistics are those of the dequantized tensors, and add up whatever the parts."""

import pickle
from functools import reduce

import numpy as np
import pytest
import torch

from mxfp4_int4 import (
    ConversionStats,
    convert_experts,
    dequantize,
    dequantize_mxfp4,
)
from tests.mxfp4_int4.support.mxfp4_reference import KINDS, experts, random_groups


def converted(kind: str, rule: str, layout: str = "plain", low: int = 95):
    codes = random_groups(kind, 512, seed=3)
    bytes_ = np.random.default_rng(4).integers(low, low + 20, 512)
    weight, scale, _ = experts(codes, bytes_)
    return (
        weight,
        scale,
        convert_experts(weight, scale, layout=layout, scale_rule=rule, collect_stats=True),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_dequantized_tensors(kind, scale_rule, layout):
    weight, scale, out = converted(kind, scale_rule, layout)
    shape = (weight.shape[0], weight.shape[1], 2 * weight.shape[2])
    exact = dequantize_mxfp4(weight, scale, torch.float64)
    error = dequantize(out, layout, shape, torch.float64) - exact
    groups = error.view(-1, 32)
    stats = out.stats
    assert stats.groups == len(groups)
    assert stats.exact_groups == (groups == 0).all(1).sum()
    assert stats.max_abs_error == error.abs().max()
    # float64 sums of a few thousand terms of one sign: each addition rounds by 2^-53.
    relative = (error.square().sum() / exact.square().sum()).item()
    assert stats.relative_squared_error == pytest.approx(relative, rel=error.numel() * 2**-53)
    values = exact.view(-1, 32)
    assert stats.zero_groups == (values == 0).all(1).sum()
    used = dequantize(out, layout, shape, torch.float64).view(-1, 32)
    assert stats.collapsed_groups == ((used == 0).all(1) & (values != 0).any(1)).sum()
    assert stats.negative_scales == (out.scale.float() < 0).sum()


def test_collapse_is_counted_for_absmax_only():
    assert converted("codes", "absmax", low=80)[2].stats.collapsed_groups > 100
    assert converted("codes", "mse", low=80)[2].stats.collapsed_groups == 0


def test_code_minus_eight_is_used_by_mse_only():
    assert converted("gauss_floor", "mse")[2].stats.minus_eights > 50
    assert converted("gauss_floor", "absmax")[2].stats.minus_eights == 0


def test_parts_add_up_in_any_order():
    weight, scale, whole = converted("gauss_floor", "mse")
    rows = [slice(0, 48), slice(48, 64), slice(64, None)]
    parts = [
        convert_experts(weight[:, part], scale[:, part], layout="plain", collect_stats=True).stats
        for part in rows
    ]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        chosen = [parts[i] for i in order]
        assert sum(chosen) == whole.stats
        assert reduce(ConversionStats.merge, chosen) == whole.stats
        assert ConversionStats().merge(*chosen) == whole.stats


def test_no_groups():
    empty = ConversionStats()
    assert (empty.groups, empty.relative_squared_error, empty.max_abs_error) == (0, 0.0, 0.0)
    assert empty.exact_share == 1.0
    assert sum([], start=empty) == empty


def test_they_travel_between_ranks_and_print_short():
    stats = converted("gauss_floor", "mse")[2].stats
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert "exact_groups=" in repr(stats)
    assert len(repr(stats)) < 200


def test_only_statistics_add():
    with pytest.raises(TypeError):
        ConversionStats() + 1
