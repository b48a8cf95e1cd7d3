# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A comparison as one HTML page that needs nothing else: no script, no font, no network.

Needs jinja2 (extra `report`). Layout, words and plots are in `templates`; numbers are made here.

The plots are templates too, because matplotlib was tried and lost. Stripped of what the page has
no use for, its SVG had 58, 11 and 6 KB where these have 35, 4 and 2 (Kimi-K3's heatmap, codes,
scales). It draws in fixed colours where the page follows the reader's light or dark theme, and has
no words for a mark that is pointed at; mending both means rewriting its SVG by pattern. It adds
1.3 s of import and 80 MB of packages.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kimi_k3.convert.options import shown
from kimi_k3.fidelity.comparison import Comparison
from kimi_k3.fidelity.figures import Figures
from kimi_k3.fidelity.formats import layer_name, percent, power, sampled


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: counts that are stacked, and the text for those who point at it."""

    label: str
    counts: tuple[int, ...]
    hint: str


@dataclass(frozen=True)
class Histogram:
    """Vertical bars, and the words for those who cannot see them."""

    title: str
    axis: str
    bars: Sequence[Bar]

    @property
    def total(self) -> int:
        """All counts together; 1 where there are none."""
        return sum(sum(bar.counts) for bar in self.bars) or 1

    @property
    def highest(self) -> float:
        """Share of the highest bar; 1 where there is none."""
        return max((sum(bar.counts) for bar in self.bars), default=0) / self.total or 1.0

    @property
    def ticks(self) -> list[float]:
        """Round shares from 0 to at most the highest, four to ten of them."""
        rough = self.highest / 4 * (1 + 1e-9)
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = max(m * magnitude for m in (1, 2, 5) if m * magnitude <= rough)
        return [step * index for index in range(int(self.highest / step + 1e-9) + 1)]


def page(comparison: Comparison, written: datetime) -> str:
    """Return the page.

    Args:
        comparison: What it shows.
        written: When, for its head.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"layer_name": layer_name, "percent": percent, "shown": shown}
    layers = [(layer, comparison.of_layer(layer)) for layer in comparison.layers]
    errors = [f.relative_squared_error for f in comparison.parts.values()]
    text = environment.get_template("page.html.j2").render(
        comparison=comparison,
        total=comparison.total,
        layers=layers,
        errors=[error for error in errors if error is not None],
        sampled=sampled(comparison.share),
        codes=_codes(comparison.total),
        scales=_scales(comparison.total),
        written=written,
    )
    # The templates' own indentation; values have no "<" or ">" left in them.
    return re.sub(r"(?<=>)\s+(?=<)", "", text).strip() + "\n"


def _codes(total: Figures) -> Histogram:
    bars = [
        Bar(str(code), (count,), f"code {code}: {count:,}")
        for code, count in total.code_histogram().items()
    ]
    return Histogram("Histogram of the int4 codes", "code", bars)


def _scales(total: Figures) -> Histogram:
    found = total.scale_histogram()
    bars = []
    # No gaps, so that distance along the axis means something.
    for exponent in range(min(found), max(found) + 1) if found else ():
        positive, negative = found.get(exponent, (0, 0))
        hint = (
            f"{power(exponent)} to {power(exponent + 1)}: {positive:,} positive, "
            f"{negative:,} negative"
        )
        bars.append(Bar(power(exponent), (positive, negative), hint))
    return Histogram("Histogram of the scales by power of two", "absolute scale", bars)
