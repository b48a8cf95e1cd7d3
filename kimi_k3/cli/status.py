# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 status`: which modules of the installed vLLM are amended here, and on what machine."""

from typing import TYPE_CHECKING

import typer

from kimi_k3.cli.output import AsJson, print_json, quiet_vllm

if TYPE_CHECKING:
    from kimi_k3.doctor.amendments import Status


def status(as_json: AsJson = False) -> None:
    """Show which modules of the installed vLLM are amended here, and why not if they are not.

    Exit code 1: an amendment was refused, or a module cannot be imported. 2: wrong usage.
    """
    quiet_vllm()
    from kimi_k3.doctor.amendments import collect

    try:
        found = collect()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    if not found.healthy:
        raise typer.Exit(1)


def _print(status: "Status") -> None:
    """Print the amendments under their outcomes, those that went wrong last, and what was found."""
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from kimi_k3.doctor.amendments import UNHEALTHY

    console = Console()
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
