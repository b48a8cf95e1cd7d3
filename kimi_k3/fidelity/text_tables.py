# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A comparison as tables for a terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kimi_k3.convert.options import shown
from kimi_k3.fidelity.comparison import Comparison
from kimi_k3.fidelity.formats import layer_name, percent, power, sampled

_BAR = 40


def print_tables(console: Console, comparison: Comparison) -> None:
    """Print the layers, the histograms, the worst groups and lines of totals."""
    plain = console.options.ascii_only
    mark = "#" if plain else "█"
    total = comparison.total
    codes = [(str(code), count) for code, count in total.code_histogram().items()]
    scales = [
        (f"2^{exponent}" if plain else power(exponent), positive + negative)
        for exponent, (positive, negative) in total.scale_histogram().items()
    ]
    console.print(_layers(comparison))
    console.print(_histogram("Codes", "code", codes, mark))
    console.print(_histogram("Scales, from this size to its double", "size", scales, mark))
    if comparison.worst:
        console.print(_worst(comparison))
    for line in _summary(comparison):
        console.print(Text(line), soft_wrap=True)


def _summary(comparison: Comparison) -> Iterator[str]:
    total = comparison.total
    yield (
        f"{total.matrices:,} matrices, {total.groups:,} groups of 32, scale rule "
        f"{comparison.scale_rule}; {percent(total.negative_share, 1)} of scales negative, "
        f"{percent(total.minus_eight_share, 1)} of codes -8"
    )
    if comparison.share < 1:
        yield f"Looked at {sampled(comparison.share)}"
    if comparison.without:
        yield f"No errors, because {shown(comparison.without)}"
    else:
        yield (
            f"Relative squared error {percent(total.relative_squared_error, 4)}, "
            f"{percent(total.exact_share, 1)} of groups exact, largest absolute error "
            f"{total.largest_error:.4g}"
        )
    if total.collapsed:
        yield f"{total.collapsed:,} groups collapsed to zero"
    if total.broken:
        yield f"{total.broken:,} groups have a scale that is no number: damaged"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _layers(comparison: Comparison) -> Table:
    compared = comparison.total.compared > 0
    names = comparison.projections if compared else []
    exact = ["exact"] if compared else []
    errors = [f"error {name}" for name in names]
    table = _table("By layer", "layer", *errors, *exact, "scales < 0", "codes -8", "groups")
    for layer in comparison.layers:
        together = comparison.of_layer(layer)
        shares = [together.exact_share] if compared else []
        shares += [together.negative_share, together.minus_eight_share]
        table.add_row(
            layer_name(layer),
            *(percent(comparison.error(layer, name)) for name in names),
            *(percent(share, 1) for share in shares),
            f"{together.groups:,}",
        )
    return table


def _histogram(title: str, what: str, rows: Sequence[tuple[str, int]], mark: str) -> Table:
    table = _table(title, what, "share")
    table.add_column("")
    counts = [count for _, count in rows]
    total, most = sum(counts) or 1, max(counts, default=0) or 1
    for label, count in rows:
        table.add_row(label, percent(count / total, 1), mark * round(_BAR * count / most))
    return table


def _worst(comparison: Comparison) -> Table:
    table = _table("Worst groups", "error", "matrix", "row", "group", "scale")
    table.columns[1].justify, table.columns[1].overflow = "left", "fold"
    for group in comparison.worst:
        table.add_row(
            percent(group.error, 2),
            Text(shown(group.tensor)),
            str(group.row),
            str(group.group),
            f"{group.scale:.4g}",
        )
    return table
