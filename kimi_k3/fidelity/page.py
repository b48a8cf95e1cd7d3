# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A report as one HTML page that needs nothing else: no script, no font, no network."""

from collections.abc import Iterator
from datetime import datetime
from html import escape

from kimi_k3.convert.options import shown
from kimi_k3.fidelity.figures import Figures
from kimi_k3.fidelity.run import Report
from kimi_k3.fidelity.style import STYLE
from kimi_k3.fidelity.svg import Bar, heatmap, histogram, percent, power


def page(report: Report, written: datetime) -> str:
    """Return the page.

    Args:
        report: What it is about.
        written: When, for its head.
    """
    name = shown(report.destination.resolve().name)
    body = "".join(_sections(report, written))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(name)}: int4 conversion report</title>"
        f"<style>{STYLE}</style></head><body><main><h1>Int4 conversion: {escape(name)}</h1>{body}"
        "</main></body></html>\n"
    )


def _sections(report: Report, written: datetime) -> Iterator[str]:
    yield _head(report, written)
    if report.without:
        yield (
            '<p class="notice">Errors are not shown: nothing was compared, because '
            f"{escape(shown(report.without))}. Codes and scales are the checkpoint's own.</p>"
        )
    yield _summary(report)
    compared = {
        key: error
        for key, figures in report.parts.items()
        if (error := figures.relative_squared_error) is not None
    }
    if compared:
        yield (
            "<h2>Where the error is</h2><p>Relative squared error: the squared differences from "
            "the MXFP4 values over the squares of these values. The stronger the colour, the "
            f"larger: from {percent(min(compared.values()))} to "
            f"{percent(max(compared.values()))}.</p>"
        )
        title = "Relative squared error by layer and projection; the table below has the numbers"
        yield _figure(heatmap(compared, report.layers, report.projections, title))
    yield _histograms(report.total)
    if report.worst:
        yield _worst(report)
    yield _layers(report)


def _head(report: Report, written: datetime) -> str:
    tools = report.manifest.tools if report.manifest is not None else {}
    if report.source is not None:
        source = shown(report.source)
    else:
        named = report.manifest.source if report.manifest is not None else "unknown"
        source = f"{shown(named)} (not compared)"
    rows = [
        ("checkpoint", shown(report.destination)),
        ("made of", source),
        ("scale rule", report.scale_rule),
        ("converted with", ", ".join(f"{n} {v}" for n, v in tools.items()) or "unknown"),
        ("report written", f"{written:%Y-%m-%d %H:%M %Z}"),
    ]
    if report.share < 1:
        rows.append(
            ("looked at", f"{100 * report.share:.4g} % of each matrix's rows, evenly spread")
        )
    cells = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows)
    return (
        "<p class=lead>Weights converted from MXFP4 to int4 with one bfloat16 "
        f"scale per group of 32 values.</p><dl class=facts>{cells}</dl>"
    )


def _summary(report: Report) -> str:
    total = report.total
    cards = []
    if total.compared:
        cards += [
            (percent(total.relative_squared_error), "relative squared error"),
            (percent(total.exact_share, 1), "of groups are exact (groups of zeros not counted)"),
            (f"{total.largest_error:.4g}", "largest absolute error of a value"),
        ]
    cards += [
        (percent(total.negative_share, 1), "of scales are negative"),
        (percent(total.minus_eight_share, 1), "of codes are -8"),
        (f"{total.groups:,}", f"groups of 32 in {total.matrices:,} matrices"),
    ]
    if total.collapsed:
        cards.append((f"{total.collapsed:,}", "groups collapsed to zero"))
    if total.broken:
        cards.append((f"{total.broken:,}", "groups with a scale that is no number"))
    parts = [f"<li><b>{escape(v)}</b><span>{escape(what)}</span></li>" for v, what in cards]
    return f"<ul class=cards>{''.join(parts)}</ul>"


def _figure(svg: str) -> str:
    return f"<div class=figure>{svg}</div>"


def _layers(report: Report) -> str:
    names = report.projections
    errors = [f.relative_squared_error or 0.0 for f in report.parts.values()]
    most = max(errors, default=0.0) or 1.0
    compared = report.total.compared > 0
    heads = [f"error of {name}" for name in names] if compared else []
    heads += ["exact groups"] if compared else []
    heads += ["negative scales", "codes -8", "groups"]
    lines = []
    for layer in report.layers:
        together = report.of_layer(layer)
        cells = []
        if compared:
            for name in names:
                figures = report.parts.get((layer, name), Figures())
                cells.append(_bar(figures.relative_squared_error, most, 3))
            cells.append(_bar(together.exact_share, 1, 1))
        cells.append(f"<td>{percent(together.negative_share, 1)}</td>")
        cells.append(f"<td>{percent(together.minus_eight_share, 1)}</td>")
        cells.append(f"<td>{together.groups:,}</td>")
        label = str(layer) if layer >= 0 else "outside"
        lines.append(f"<tr><th scope=row>{label}</th>{''.join(cells)}</tr>")
    titles = "".join(f"<th scope=col>{escape(head)}</th>" for head in heads)
    return (
        "<h2>By layer</h2><div class=scroll><table><thead><tr><th scope=col>layer</th>"
        f"{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _bar(share: float | None, full: float, digits: int) -> str:
    if share is None:
        return f"<td>{percent(None)}</td>"
    width = 100 * min(1.0, share / full)
    return (
        f'<td class=barred><i style="width:{width:.1f}%"></i><span>{percent(share, digits)}</span>'
        "</td>"
    )


def _histograms(total: Figures) -> str:
    codes = [
        Bar(str(code), (count,), f"code {code}: {count:,}")
        for code, count in total.code_histogram().items()
    ]
    found = total.scale_histogram()
    # No gaps, so that distance along the axis means something.
    every = range(min(found), max(found) + 1) if found else range(0)
    scales = []
    for exponent in every:
        counts = found.get(exponent, (0, 0))
        hint = f"{power(exponent)} to {power(exponent + 1)}: {counts[0]:,} positive, {counts[1]:,} "
        scales.append(Bar(power(exponent), counts, f"{hint}negative"))
    return (
        "<h2>Codes</h2><p>How often each of the sixteen int4 codes is used. -8 has no positive "
        "counterpart: a scale of the right sign makes use of it.</p>"
        + _figure(histogram(codes, "Histogram of the int4 codes", "code"))
        + "<h2>Scales</h2><p>Groups by the size of their scale, from the power of two that is "
        'named to the next. <span class="key0">■</span> positive, <span class="key1">■</span> '
        "negative scales.</p>"
        + _figure(histogram(scales, "Histogram of the scales by power of two", "absolute scale"))
    )


def _worst(report: Report) -> str:
    lines = []
    for group in report.worst:
        first = 32 * group.group
        error = percent(group.error) if group.error < float("inf") else "no number"
        lines.append(
            f"<tr><td>{error}</td><td class=name>{escape(shown(group.tensor))}</td>"
            f"<td>{group.row:,}</td><td>{group.group:,} (values {first:,} to {first + 31:,})</td>"
            f"<td>{group.scale:.6g}</td></tr>"
        )
    heads = ("error", "matrix", "row", "group", "scale")
    titles = "".join(
        f"<th scope=col{' class=name' if head == 'matrix' else ''}>{head}</th>" for head in heads
    )
    return (
        "<h2>Worst groups</h2><p>The groups with the largest relative squared error.</p>"
        f"<div class=scroll><table><thead><tr>{titles}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
