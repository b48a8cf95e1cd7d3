# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 status`: which modules of the installed vLLM are amended here, and on what machine."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kimi_k3.cli.output import quiet_vllm
from kimi_k3.doctor.amendments import UNHEALTHY, Status, collect


def _print(status: Status, console: Console) -> None:
    """Print the amendments under their outcomes, those that went wrong last, and what was found."""
    console.print(Text("Amended modules, by outcome", "bold"))
    outcomes = dict.fromkeys(row.outcome for row in status.amendments)
    for outcome in sorted(outcomes, key=lambda outcome: outcome in UNHEALTHY):
        rows = [row for row in status.amendments if row.outcome == outcome]
        style = "bold red" if outcome in UNHEALTHY else "bold green"
        console.print()
        console.print(Text(f"{outcome}: {len(rows)}", style))
        # A reason that all share (the overlay is off) is given once.
        shared = rows[0].why if len({row.why for row in rows}) == 1 else None
        for row in rows:
            console.print(Padding(Text(row.module), (0, 0, 0, 2)))
            if shared is None:
                console.print(Padding(Text(row.why, "dim"), (0, 0, 0, 6)))
        if shared is not None:
            console.print(Padding(Text(shared, "dim"), (0, 0, 0, 6)))
    found = Table(box=box.SIMPLE, title="Found", title_justify="left", show_header=False)
    for name, value in status.versions.items():
        found.add_row(name, Text(value))
    found.add_row("platform", status.platform)
    found.add_row("GPU architecture", status.architecture)
    console.print(found)


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
) -> None:
    """Show which modules of the installed vLLM are amended here, and why not if they are not.

    Exit code 1: an amendment was refused, or a module cannot be imported. 2: wrong usage.
    """
    quiet_vllm()
    try:
        status = collect()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(asdict(status), indent=2))
    else:
        _print(status, Console())
    if not status.healthy:
        raise typer.Exit(1)
