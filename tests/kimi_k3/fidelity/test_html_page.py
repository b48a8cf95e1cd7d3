# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The page: well formed, self-contained, safe with any name, and readable without seeing plots."""

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kimi_k3.fidelity.comparison import Comparison, compare
from kimi_k3.fidelity.figures import Figures, Group
from kimi_k3.fidelity.html_page import Bar, Histogram, page

WRITTEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
VOID = {"meta"}


class Parsed(HTMLParser):
    """Checks that tags are balanced; keeps what was found."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def made(int4) -> str:
    return page(compare(int4), WRITTEN)


def figures(**changes) -> Figures:
    counts = {"matrices": 1, "groups": 4, "compared": 4, "exact": 1}
    sums = {"squared_error": 1.0, "squared_value": 100.0}
    codes, scales = [0] * 16, [0] * 512
    codes[3], scales[120] = 128, 4
    return Figures(**counts | sums | changes, codes=tuple(codes), scales=tuple(scales))


def comparison(parts: dict, **changes) -> Comparison:
    given = {"destination": Path("/k3"), "source": None, "without": "", "manifest": None}
    return Comparison(**given | changes, share=1.0, parts=parts)


def test_nothing_is_fetched_and_nothing_runs(made):
    parsed = Parsed(made)
    tags = {tag for tag, _ in parsed.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    for _, attributes in parsed.seen:
        assert not attributes.keys() & {"src", "href", "onload", "onclick"}
    assert not re.search(r"https?:|url\(|@import", made)


def test_it_says_what_when_and_by_which_rule(made, int4, mxfp4):
    text = Parsed(made).text
    for part in (str(int4), str(mxfp4), "mse", "torch", "2026-01-02 03:04 UTC", "w2", "Worst"):
        assert part in text


def test_plots_have_words(made):
    plots = [attributes for tag, attributes in Parsed(made).seen if tag == "svg"]
    assert len(plots) == 3
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)


def test_names_do_no_harm():
    evil = '<script>alert("x")</script>&'
    made = comparison(
        {(1, evil): figures(broken=1)},
        destination=Path("/tmp") / "a<b>&\udce9\n",
        source=Path(evil.replace("/", "")),
        worst=(Group(float("inf"), evil, 1, 2, float("nan")),),
    )
    text = page(made, WRITTEN)
    assert "<script" not in text
    assert "scale that is no number" in text
    Parsed(text)
    text.encode("utf-8")


def test_without_a_source_it_says_so():
    found = comparison({(1, "w1"): figures(compared=0)}, without="the source is gone")
    text = Parsed(page(found, WRITTEN)).text
    assert "because the source is gone" in text
    assert "Where the error is" not in text
    assert "relative squared error" not in text


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {(-1, "proj"): figures()},
        {(1, "w1"): figures(squared_error=0.0)},
        {(1, "w1"): figures(), (3, "w2"): figures(squared_error=5)},
        {(layer, "w1"): figures() for layer in range(300)},
        {(1, "w1"): Figures(matrices=1)},
    ],
    ids=["none", "outside", "exact", "gaps", "many", "empty"],
)
def test_odd_shapes_make_a_page(parts):
    made = page(comparison(parts), WRITTEN)
    Parsed(made)
    assert "nan" not in made.lower().replace("-apple-system", "")


def test_the_same_figures_make_the_same_page(made, int4):
    assert page(compare(int4), WRITTEN) == made


@pytest.mark.parametrize(
    ("counts", "ticks"),
    [
        ([], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([1], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([13] * 7 + [9], [0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12]),
        ([40, 40, 20], [0, 0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_ticks_are_round(counts, ticks):
    plot = Histogram("", "", [Bar("", (count,), "") for count in counts])
    assert plot.ticks == pytest.approx(ticks)
