# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Every code at every scale byte and every pair of codes in a group, bit-exact."""

import numpy as np
import pytest
import torch

from mxfp4_int4 import (
    ConversionInputError,
    convert,
    convert_experts,
    dequantize,
)
from tests.mxfp4_int4.support.mxfp4_reference import (
    VALUES,
    bf16_scales,
    brute_force,
    error_table,
    experts,
    normalized_error,
)

HELD = {253: 6, 254: 4}  # from this e2m1 magnitude on, values are 2^128 and more


def one_code_groups() -> tuple[np.ndarray, np.ndarray]:
    """Every code at every byte that bf16 holds, filling its group and alone somewhere in it."""
    codes, bytes_ = [], []
    for byte in range(255):
        for code in range(16):
            if code % 8 >= HELD.get(byte, 8):
                continue
            alone = np.zeros(32, int)
            alone[(byte + 2 * code) % 32] = code
            codes += [np.full(32, code), alone]
            bytes_ += [byte] * 2
    return np.array(codes), np.array(bytes_)


@pytest.fixture(scope="module")
def every_code():
    codes, bytes_ = one_code_groups()
    return *experts(codes, bytes_), codes, bytes_


def test_every_code_at_every_byte_is_exact(every_code, converted_by):
    weight, scale, count, codes, bytes_ = every_code
    out = converted_by(weight, scale, layout="plain")
    values = dequantize(out, "plain", out.weight.shape, torch.float64).view(-1, 32)[:count]
    expected = VALUES[codes] * 2.0 ** (bytes_ - 127.0)[:, None]
    assert np.array_equal(values.numpy(), expected)


def test_every_code_at_every_byte_by_absmax(every_code, converted_by):
    """Against the rule in float32, as documented: f32(amax clamped)/7, codes with 7/amax."""
    weight, scale, count, codes, bytes_ = every_code
    out = converted_by(weight, scale, layout="plain", scale_rule="absmax")
    dense = torch.from_numpy(VALUES[codes] * 2.0 ** (bytes_ - 127.0)[:, None]).float()
    amax = dense.abs().amax(1).clamp(min=1e-6)
    new = (dense * (7 / amax)[:, None]).round().clamp(-7, 7).to(torch.int8)
    assert torch.equal(out.weight.view(-1, 32)[:count], new)
    assert torch.equal(out.scale.view(-1)[:count], (amax / 7).to(torch.bfloat16))


@pytest.mark.parametrize("byte", [253, 254])
@pytest.mark.parametrize("code", range(16))
def test_values_that_bf16_cannot_hold_are_refused(byte, code, scale_rule):
    weight, scale, _ = experts(np.full((1, 32), code), byte)
    held = code % 8 < HELD[byte]
    if held:
        convert_experts(weight, scale, layout="aiter", scale_rule=scale_rule)
        return
    with pytest.raises(ConversionInputError, match=r"expert 0, row 0, group 0.*cannot hold"):
        convert_experts(weight, scale, layout="aiter", scale_rule=scale_rule)


def pairs() -> np.ndarray:
    """Every ordered pair of codes in a group, in three mixtures: 1 of 32, half and half, 31."""
    groups = []
    for a in range(16):
        for b in range(16):
            for share in (1, 16, 31):
                groups.append([a] * share + [b] * (32 - share))
    return np.array(groups)


@pytest.mark.parametrize("byte", [0, 1, 2, 105, 127, 252])
def test_every_pair_of_codes(byte, converted_by):
    codes = pairs()
    weight, scale, count = experts(codes, byte)
    errors = {}
    for rule in ("mse", "absmax"):
        out = converted_by(weight, scale, layout="plain", scale_rule=rule)
        new = out.weight.view(-1, 32)[:count].numpy()
        scales = out.scale.view(-1)[:count].double().numpy()
        errors[rule] = normalized_error(codes, np.full(count, byte), new, scales)
    best = brute_force(codes, byte)
    value = (VALUES[codes] ** 2).sum(1)
    assert (errors["mse"] <= errors["absmax"]).all()
    assert (errors["mse"] >= best - 1e-12 * value).all()
    assert errors["mse"].sum() <= 1.02 * best.sum()
    table = error_table(bf16_scales(byte))
    seen = np.stack([(codes == kind).any(1) for kind in (*range(1, 8), *range(9, 16))], 1)
    representable = ((seen.astype(float) @ (table != 0)) == 0).any(1)
    assert (errors["mse"][representable] == 0).all()
    assert representable.sum() > 500


def test_every_implementation_gives_the_same_bits_for_pairs(converted_by, scale_rule):
    weight, scale, _ = experts(pairs(), np.arange(768) % 253)
    expected = convert._convert(weight, scale, "plain", scale_rule, 8, False, False, convert.NAIVE)
    out = converted_by(weight, scale, layout="plain", scale_rule=scale_rule)
    assert torch.equal(out.weight, expected.weight)
    assert torch.equal(out.scale.view(torch.int16), expected.scale.view(torch.int16))
