# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The subcommands of `kimi-k3`. Their modules import what they work with when they are run."""

import sys
from typing import Annotated

import typer

from kimi_k3.cli.convert import convert
from kimi_k3.cli.doctor import doctor
from kimi_k3.cli.make_checkpoint import make_checkpoint
from kimi_k3.cli.output import run
from kimi_k3.cli.plan import plan
from kimi_k3.cli.rehearse import rehearse
from kimi_k3.cli.report import report
from kimi_k3.cli.status import status

app = typer.Typer(
    name="kimi-k3",
    help="Kimi-K3 on AMD GPUs: what the overlay does to the installed vLLM, and tools around it.",
    no_args_is_help=True,
    # Rich takes longer to import than everything else that help needs.
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (convert, doctor, make_checkpoint, plan, rehearse, report, status):
    # The first line of its docstring, which click would cut off.
    summary = (command.__doc__ or "").partition("\n")[0]
    app.command(command.__name__.replace("_", "-"), short_help=summary)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kimi-k3 {version('vllm-kimi-k3')}")
        raise typer.Exit


@app.callback()
def _group(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the overlay's version."
        ),
    ] = False,
) -> None:
    # Its option is dealt with before any subcommand.
    pass


def main() -> None:
    """Entry point of the console script."""
    try:
        run(lambda: app(prog_name="kimi-k3"))
    except ModuleNotFoundError as error:
        from vllm_overlay.tree import NOT_INSTALLED, PACKAGE

        if error.name == PACKAGE:
            sys.exit(f"error: {NOT_INSTALLED}")
        if error.name == "torch":
            sys.exit("error: this command needs torch, which comes with vLLM and is not installed")
        raise
