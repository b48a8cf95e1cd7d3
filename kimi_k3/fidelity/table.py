# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A report as tables for a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kimi_k3.convert.options import shown
from kimi_k3.fidelity.figures import Figures
from kimi_k3.fidelity.run import Report
from kimi_k3.fidelity.svg import percent, power

_BAR = 40


def print_report(console: Console, report: Report) -> None:
    """Print the layers, the histograms, the worst groups and a line of totals."""
    console.print(_layers(report))
    total = report.total
    codes = [(str(code), (count,)) for code, count in total.code_histogram().items()]
    mark = "#" if console.options.ascii_only else "█"
    console.print(_histogram("Codes", "code", codes, mark))
    scales = [
        (f"2^{exponent}" if console.options.ascii_only else power(exponent), pair)
        for exponent, pair in total.scale_histogram().items()
    ]
    console.print(_histogram("Scales, from this size to its double", "size", scales, mark))
    if report.worst:
        console.print(_worst(report))
    for line in summary(report):
        console.print(Text(line), soft_wrap=True)


def summary(report: Report) -> list[str]:
    """Return what the whole comes to, in lines."""
    total = report.total
    first = (
        f"{total.matrices:,} matrices, {total.groups:,} groups of 32, scale rule "
        f"{report.scale_rule}; {percent(total.negative_share, 1)} of scales negative, "
        f"{percent(total.minus_eight_share, 1)} of codes -8"
    )
    lines = [first]
    if report.share < 1:
        lines.append(f"Looked at {100 * report.share:.4g} % of each matrix's rows, evenly spread")
    if report.without:
        lines.append(f"No errors, because {shown(report.without)}")
    else:
        lines.append(
            f"Relative squared error {percent(total.relative_squared_error, 4)}, "
            f"{percent(total.exact_share, 1)} of groups exact, largest absolute error "
            f"{total.largest_error:.4g}"
        )
    if total.collapsed:
        lines.append(f"{total.collapsed:,} groups collapsed to zero")
    if total.broken:
        lines.append(f"{total.broken:,} groups have a scale that is no number: damaged")
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _layers(report: Report) -> Table:
    compared = report.total.compared > 0
    names = report.projections if compared else []
    columns = ["layer", *(f"error {name}" for name in names)]
    columns += ["exact"] if compared else []
    table = _table("By layer", *columns, "scales < 0", "codes -8", "groups")
    for layer in report.layers:
        together = report.of_layer(layer)
        cells = [
            percent(report.parts.get((layer, name), Figures()).relative_squared_error)
            for name in names
        ]
        cells += [percent(together.exact_share, 1)] if compared else []
        table.add_row(
            str(layer) if layer >= 0 else "outside",
            *cells,
            percent(together.negative_share, 1),
            percent(together.minus_eight_share, 1),
            f"{together.groups:,}",
        )
    return table


def _histogram(
    title: str, what: str, rows: Sequence[tuple[str, tuple[int, ...]]], mark: str
) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column(what, justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    total = sum(sum(counts) for _, counts in rows) or 1
    most = max((sum(counts) for _, counts in rows), default=0) or 1
    for label, counts in rows:
        bar = mark * round(_BAR * sum(counts) / most)
        table.add_row(label, percent(sum(counts) / total, 1), bar)
    return table


def _worst(report: Report) -> Table:
    table = Table(box=box.SIMPLE, title="Worst groups", title_justify="left")
    table.add_column("error", justify="right")
    table.add_column("matrix", overflow="fold")
    for column in ("row", "group", "scale"):
        table.add_column(column, justify="right")
    for group in report.worst:
        error = percent(group.error, 2) if group.error < float("inf") else "no number"
        table.add_row(
            error,
            Text(shown(group.tensor)),
            str(group.row),
            str(group.group),
            f"{group.scale:.4g}",
        )
    return table
