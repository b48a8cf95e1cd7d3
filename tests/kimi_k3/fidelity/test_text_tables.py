# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The tables: what was compared and what was not, on terminals that know little, with any name."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from kimi_k3.fidelity.comparison import Comparison
from kimi_k3.fidelity.figures import Figures, Group
from kimi_k3.fidelity.text_tables import print_tables


def printed(encoding: str = "utf-8", **changes) -> str:
    codes, scales = [0] * 16, [0] * 512
    codes[0], scales[120], scales[256 + 121] = 32, 3, 1
    figures = Figures(
        matrices=1,
        groups=4,
        compared=4,
        exact=1,
        squared_error=1.0,
        squared_value=100.0,
        codes=tuple(codes),
        scales=tuple(scales),
    )
    given = {"source": Path("/k3"), "without": "", "manifest": None, "share": 1.0}
    given["parts"] = {(1, "w1"): figures, (-1, "proj"): figures}
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_tables(Console(file=file, width=100), Comparison(Path("/int4"), **given | changes))
    file.seek(0)
    return file.read()


def test_errors_stand_by_layer_and_projection():
    text = printed()
    for part in ("error proj", "error w1", "exact", "1.000 %", "2⁻⁷", "█", "2 matrices, 8 groups"):
        assert part in text
    layers = [line.split() for line in text.splitlines() if line.strip()[:1] in ("1", "o")]
    assert " ".join(layers[0]) == "outside 1.000 % - 25.0 % 25.0 % 100.0 % 4"
    assert " ".join(layers[1]) == "1 - 1.000 % 25.0 % 25.0 % 100.0 % 4"


def test_without_a_source_there_are_no_errors():
    text = printed(source=None, without="it is gone", parts={(1, "w1"): Figures(1, 4)})
    assert "No errors, because it is gone" in text
    assert "error w1" not in text
    assert "exact" not in text


def test_an_ascii_terminal_gets_ascii():
    text = printed("ascii", parts={(1, "w1"): Figures(1, 4, scales=(0,) * 120 + (4,) + (0,) * 391)})
    assert text.isascii()
    assert "2^-7" in text
    assert "####" in text


@pytest.mark.parametrize("error", [float("inf"), 0.03])
def test_names_do_no_harm(error):
    group = Group(error, "a\x1b[31m[bold]b", 1, 2, float("nan"))
    text = printed(worst=(group,), share=0.25)
    assert "\x1b" not in text
    assert "[bold]b" in text
    assert ("no number" if error > 1 else "3.00 %") in text
    assert "Looked at 25 % of each matrix's rows" in text


def test_damage_is_counted():
    text = printed(parts={(1, "w1"): Figures(1, 4, 4, broken=2, collapsed=1)})
    assert "1 groups collapsed to zero" in text
    assert "2 groups have a scale that is no number: damaged" in text
