# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 report`: what a conversion to int4 did to a checkpoint, as table, JSON and HTML page.

Parses and prints; `kimi_k3.fidelity` does the work, and imports torch when it does.
"""

import json
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k3.cli.output import check_writable, fail, printable

if TYPE_CHECKING:
    from kimi_k3.fidelity.comparison import Choice, Comparison


def report(
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="DST", help="An int4 checkpoint's folder, as kimi-k3 convert writes it."
        ),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC",
            help="The MXFP4 checkpoint to compare with. Without it: the one that DST was "
            "converted from, if it is still there.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Only these, such as 1,5-9. Without it: all.", show_default=False
        ),
    ] = None,
    sample: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Share of each matrix's rows to read, evenly spread; 0.01 makes a large "
            "checkpoint quick.",
        ),
    ] = 1.0,
    worst: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, metavar="N", help="How many of the groups with the largest errors."
        ),
    ] = 10,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write one HTML page with plots as well; it needs no network.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
) -> None:
    """Report on a checkpoint that was converted to int4: its errors, codes and scales.

    Errors are computed anew from the source and the result: relative squared error, exact groups
    and the worst groups of each layer and projection. Without a source there are codes and scales
    alone. Checksums are not looked at; `kimi-k3 convert --verify` does that.

    Exit code 1: the checkpoint is damaged, or not one that can be reported on. 2: wrong usage.
    """
    from rich.console import Console

    from kimi_k3.fidelity.comparison import Choice
    from kimi_k3.fidelity.text_tables import print_tables

    try:
        if html is not None:
            check_page(html)
        chosen = None if layers is None else parse_layers(layers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        comparison = _compare(destination, Choice(source, chosen, sample, worst))
        if html is not None:
            from kimi_k3.fidelity.html_page import page

            write_whole(html, page(comparison, datetime.now(UTC)))
    except (ValueError, OSError) as error:
        fail(str(error), as_json)
    if html is not None:
        print(f"page: {printable(str(html))}", file=sys.stderr)
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=1))
    else:
        print_tables(Console(), comparison)


def check_page(file: Path) -> None:
    """Refuse a page that could not be made or written, or would replace something that is none.

    Raises:
        ValueError: See above.
    """
    check_writable(file)
    if file.suffix.lower() not in (".html", ".htm") and not (file.exists() and not file.is_file()):
        raise ValueError(f"{file}: expected a name that ends in .html")
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "--html needs jinja2: pip install 'vllm-kimi-k3[report]', or leave --html out"
        ) from error


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: It cannot be written; what was there before is still there.
    """
    if file.exists() and not file.is_file():
        # A pipe or a device cannot be replaced.
        file.write_text(text, encoding="utf-8")
        return
    partial = file.with_name(f".kimi-k3-report-{secrets.token_hex(8)}")
    try:
        with partial.open("x", encoding="utf-8") as written:
            written.write(text)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def parse_layers(text: str) -> frozenset[int]:
    """Return the layers of a list such as ``1,5-9``.

    Raises:
        ValueError: It is no such list.
    """
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.strip().isdecimal() and len(end.strip()) < 6 for end in ends):
            raise ValueError(f"layers: expected a list such as 1,5-9, found {text!r}")
        begin, end = (int(end) for end in ends)
        if begin > end:
            raise ValueError(f"layers: {part.strip()} ends before it begins")
        layers.update(range(begin, end + 1))
    return frozenset(layers)


def _compare(destination: Path, choice: "Choice") -> "Comparison":
    """Compare, with a bar of progress on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from kimi_k3.fidelity.comparison import compare

    console = Console(stderr=True)
    columns = "comparing matrices", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("matrices", total=None)
        return compare(
            destination,
            choice,
            on_matrices=lambda count: progress.update(task, total=count),
            on_matrix=lambda: progress.advance(task),
        )
