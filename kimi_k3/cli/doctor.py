# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 doctor`: what this machine can do with this model, and what stands in the way.

Parses and prints; `kimi_k3.doctor` looks and judges, and imports torch and vLLM when it does.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k3.cli.output import print_json, printable, quiet_vllm
from kimi_k3.cli.plan import DEFAULT_UTILIZATION, ExpertParallel, Sizes, Utilization

if TYPE_CHECKING:
    from kimi_k3.doctor.findings import Diagnosis

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint's folder, or a hub id in the local cache; nothing is downloaded. "
            "Without it: the machine alone.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            min=1,
            metavar="N",
            help="Tensor-parallel ranks. Default: every GPU, or one rank on a CPU.",
            show_default=False,
        ),
    ] = None,
    expert_parallel: ExpertParallel = False,
    utilization: Utilization = DEFAULT_UTILIZATION,
    load_format: Annotated[
        str, typer.Option(metavar="NAME", help="vLLM's --load-format that you will use.")
    ] = "auto",
    as_json: Sizes = False,
) -> None:
    """Tell whether this machine can serve a Kimi-K3 checkpoint, and if not, what to do.

    Looks at the GPUs, AITER, vLLM and the overlay's amendments, at environment variables, and of
    a MODEL at config.json and the shards' headers. Loads nothing and changes nothing.

    Exit code 0: ready (with warnings, perhaps). 1: not ready. 2: wrong usage.
    """
    from rich.console import Console

    quiet_vllm()
    from kimi_k3.doctor.checkpoint import NoSuchModelError
    from kimi_k3.doctor.diagnose import ServeOptions, diagnose

    options = ServeOptions(tp, expert_parallel, utilization, load_format)
    try:
        with Console(stderr=True).status("looking"):
            found = diagnose(model, options)
    except NoSuchModelError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    if not found.ready:
        raise typer.Exit(1)


def _print(found: "Diagnosis") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, title="Kimi-K3 on this machine", title_justify="left")
    table.add_column("")
    table.add_column("what", overflow="fold")
    table.add_column("found", overflow="fold", ratio=1)
    area = ""
    for row in found.findings:
        if row.area != area:
            if area:
                table.add_section()
            area = row.area
        table.add_row(
            Text(row.level.value, _STYLES[row.level.value]),
            Text(row.subject),
            Text(printable(row.text)),
        )
    console.print(table)
    if found.command:
        console.print(Text(printable(f"serve it with: {found.command}")), soft_wrap=True)
    style = "bold red" if not found.ready else "bold green"
    console.print(Text(printable(found.verdict), style), soft_wrap=True)
