# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A share too small to show is not shown as zero, and none is not shown as a number."""

import pytest

from kimi_k3.fidelity.formats import layer_name, percent, power, sampled


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (None, 3, "-"),
        (float("inf"), 2, "no number"),
        (0.0, 3, "0.000 %"),
        (1e-9, 3, "<0.001 %"),
        (4.9e-6, 3, "<0.001 %"),
        (5.1e-6, 3, "0.001 %"),
        (0.12345, 1, "12.3 %"),
        (1.0, 1, "100.0 %"),
    ],
)
def test_shares(share, digits, text):
    assert percent(share, digits) == text


def test_powers_layers_and_samples():
    assert [power(exponent) for exponent in (-10, 0, 7)] == ["2⁻¹⁰", "2⁰", "2⁷"]
    assert [layer_name(layer) for layer in (-1, 0, 92)] == ["outside", "0", "92"]
    assert sampled(0.01) == "1 % of each matrix's rows, evenly spread"
