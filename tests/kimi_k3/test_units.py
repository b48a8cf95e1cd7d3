# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Sizes read well from bytes to terabytes, and none that is not zero reads as zero."""

import pytest

from kimi_k3.units import Unit, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (8.71 * 2**20, "8.71 MiB"),
        (187.13 * 2**30, "187.13 GiB"),
        (1.42 * 2**40, "1.42 TiB"),
        (-3 * 2**30, "-3.00 GiB"),
    ],
)
def test_size(nbytes, text):
    assert size(nbytes) == text


def test_a_column_has_one_unit():
    column = Unit(9 * 2**20)
    assert column.name == "MiB"
    assert [column.format(n * 2**20) for n in (9, 0.25, 0.001, 0)] == ["9.00", "0.25", "<0.01", "0"]
    assert Unit(300 * 2**40).name == "GiB"
    assert Unit(0).name == "B"
    assert Unit(2**30).format(2**30, digits=4) == "1.0000"
