# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Gathers the subcommands of `kimi-k3`. Imports no torch and uses no vLLM; a subcommand may."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from kimi_k3.cli.convert import convert
from kimi_k3.cli.doctor import doctor
from kimi_k3.cli.make_checkpoint import make_checkpoint
from kimi_k3.cli.output import run
from kimi_k3.cli.plan import plan
from kimi_k3.cli.rehearse import rehearse
from kimi_k3.cli.report import report
from kimi_k3.cli.status import command as status
from vllm_overlay.tree import NOT_INSTALLED, PACKAGE

app = typer.Typer(
    name="kimi-k3",
    help="Kimi-K3 on AMD GPUs: what the overlay does to the installed vLLM, and tools around it.",
    no_args_is_help=True,
    # Paragraphs of a docstring flow to the terminal's width.
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert)
app.command("doctor")(doctor)
app.command("make-checkpoint")(make_checkpoint)
app.command("plan")(plan)
app.command("rehearse")(rehearse)
app.command("report")(report)
app.command("status")(status)


def _print_version(wanted: bool) -> None:
    if wanted:
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
        if error.name == PACKAGE:
            sys.exit(f"error: {NOT_INSTALLED}")
        if error.name == "torch":
            sys.exit("error: this command needs torch, which comes with vLLM and is not installed")
        raise
