# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Plots as inline SVG, drawn here: no library, no script, colours from the page's own variables.

Every plot has a title for those who cannot see it, and every mark one for those who point at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# More labels than this along an axis are thinned out.
_MOST_LABELS = 24


def power(exponent: int) -> str:
    """Return 2 to an integer power as text."""
    return f"2{str(exponent).translate(_SUPERSCRIPTS)}"


def percent(share: float | None, digits: int = 3) -> str:
    """Return a share as a percentage; a dash where there is none."""
    if share is None:
        return "-"
    if 0 < share < 0.5 * 10 ** -(digits + 2):
        return f"<{10**-digits:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, of one or two counts that stand on each other."""

    label: str
    counts: tuple[int, ...]
    hint: str


def histogram(bars: Sequence[Bar], title: str, axis: str) -> str:
    """Return vertical bars.

    Args:
        bars: From left to right.
        title: What a screen reader says.
        axis: What stands under the labels.
    """
    width, height, left, bottom, top = 720, 260, 56, 46, 12
    total = sum(sum(bar.counts) for bar in bars) or 1
    highest = max((sum(bar.counts) for bar in bars), default=0) / total or 1.0
    step = (width - left - 8) / max(1, len(bars))
    reach = height - bottom - top
    parts = [_open(width, height, title)]
    for share in _ticks(highest):
        y = top + reach * (1 - share / highest)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, f"{100 * share:.3g} %", "end"))
    thin = -(-len(bars) // _MOST_LABELS)
    for index, bar in enumerate(bars):
        x, y = left + index * step, float(top + reach)
        parts.append(f"<g><title>{escape(bar.hint)}</title>")
        for kind, count in enumerate(bar.counts):
            tall = reach * count / total / highest
            y -= tall
            parts.append(
                f'<rect class="bar{kind}" x="{x + step * 0.1:.1f}" y="{y:.1f}" '
                f'width="{step * 0.8:.1f}" height="{tall:.1f}"/>'
            )
        parts.append("</g>")
        if index % thin == 0:
            parts.append(_text(x + step / 2, top + reach + 18, bar.label, "middle"))
    parts.append(_text(left + (width - left) / 2, height - 6, axis, "middle"))
    return "".join([*parts, "</svg>"])


def heatmap(
    values: dict[tuple[int, str], float],
    columns: Sequence[int],
    rows: Sequence[str],
    title: str,
) -> str:
    """Return layers from left to right, projections from top to bottom, stronger for larger values.

    Args:
        values: (layer, projection) -> a share.
        columns: Layers.
        rows: Projections.
        title: What a screen reader says.
    """
    left, top, tall = 64, 8, 30
    step = min(48.0, max(7.0, 656 / max(1, len(columns))))
    width, height = int(left + step * len(columns) + 8), top + tall * len(rows) + 40
    least, most = min(values.values()), max(values.values())
    parts = [_open(width, height, title)]
    for row, name in enumerate(rows):
        y = top + row * tall
        parts.append(_text(left - 8, y + tall / 2 + 4, name, "end"))
        for column, layer in enumerate(columns):
            value = values.get((layer, name))
            if value is None:
                continue
            shade = 0.15 + 0.85 * ((value - least) / (most - least) if most > least else 0.5)
            parts.append(
                f'<rect class="cell" x="{left + column * step:.1f}" y="{y}" '
                f'width="{step - 1:.1f}" height="{tall - 2}" fill-opacity="{shade:.2f}">'
                f"<title>layer {_layer(layer)}, {escape(name)}: {percent(value)}</title></rect>"
            )
    thin = -(-len(columns) // (_MOST_LABELS if step >= 20 else _MOST_LABELS // 2))
    for column, layer in enumerate(columns):
        if column % thin == 0:
            x = left + column * step + step / 2
            parts.append(_text(x, top + tall * len(rows) + 16, _layer(layer), "middle"))
    middle = left + step * len(columns) / 2
    parts.append(_text(middle, height - 4, "layer", "middle"))
    return "".join([*parts, "</svg>"])


def _layer(layer: int) -> str:
    return str(layer) if layer >= 0 else "none"


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(highest: float) -> list[float]:
    """Return round numbers from 0 to at most the highest share, about four of them."""
    step = _round_step(highest / 4)
    count = int(highest / step + 1e-9)
    return [step * index for index in range(count + 1)]


def _round_step(rough: float) -> float:
    magnitude = 1.0
    while magnitude > rough:
        magnitude /= 10
    return next(magnitude * m for m in (10, 5, 2, 1) if magnitude * m <= rough)
