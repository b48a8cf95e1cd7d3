# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Counts add up, shares are those of what was counted, and nothing breaks where nothing was."""

import json
import math
from dataclasses import replace

import pytest

from kimi_k3.fidelity.figures import Figures, Group, worst


def figures(**changes) -> Figures:
    codes, scales = [0] * 16, [0] * 512
    codes[0], codes[8] = 20, 300
    scales[120], scales[256 + 121] = 7, 3
    made = Figures(
        matrices=1,
        groups=10,
        compared=10,
        exact=4,
        zero=2,
        squared_error=1.0,
        squared_value=50.0,
        largest_error=0.5,
        codes=tuple(codes),
        scales=tuple(scales),
    )
    return replace(made, **changes)


def test_counts_add_up():
    total = figures() + figures(largest_error=2.0)
    assert (total.matrices, total.groups, total.exact) == (2, 20, 8)
    assert (total.squared_error, total.largest_error) == (2.0, 2.0)
    assert total.codes[0] == 40
    assert total.scales[120] == 14
    # Every field is added up, whichever there are.
    assert total + Figures() == Figures() + total == total
    ones = Figures(*[1] * 10, codes=(1,) * 16, scales=(1,) * 512)
    assert ones + ones == Figures(*[2] * 9, 1, codes=(2,) * 16, scales=(2,) * 512)


def test_shares():
    found = figures()
    assert found.relative_squared_error == pytest.approx(0.02)
    # Groups of zeros are exact in any form and not counted.
    assert found.exact_share == pytest.approx(2 / 8)
    assert found.negative_share == pytest.approx(0.3)
    assert found.minus_eight_share == pytest.approx(20 / 320)


def test_histograms_name_codes_and_powers_of_two():
    found = figures()
    assert found.code_histogram()[-8] == 20
    assert found.code_histogram()[0] == 300
    assert found.scale_histogram() == {-7: (7, 0), -6: (0, 3)}


def test_nothing_counted_is_no_error():
    empty = Figures()
    assert empty.relative_squared_error is None
    assert empty.exact_share is None
    assert (empty.negative_share, empty.minus_eight_share) == (0.0, 0.0)
    assert empty.scale_histogram() == {}
    zeros = Figures(groups=3, compared=3, exact=3, zero=3)
    assert (zeros.relative_squared_error, zeros.exact_share) == (0.0, 1.0)


def test_worst_groups_come_in_one_order():
    groups = [Group(0.1, "b", 0, 0, 1.0), Group(0.1, "a", 1, 0, 1.0), Group(0.3, "c", 0, 0, 1.0)]
    groups.append(Group(math.inf, "d", 0, 0, 1.0))
    assert [group.tensor for group in worst(groups, 3)] == ["d", "c", "a"]
    assert worst(reversed(groups), 3) == worst(groups, 3)


def test_everything_is_plain_json():
    text = json.dumps(figures().as_dict(), allow_nan=False)
    assert json.loads(text)["scales"] == {
        "-7": {"positive": 7, "negative": 0},
        "-6": {"positive": 0, "negative": 3},
    }
    group = Group(math.inf, "t", 0, 0, math.nan).as_dict()
    assert json.loads(json.dumps(group, allow_nan=False))["relative_squared_error"] is None
