# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 convert`: the int4 checkpoint, once and offline.

Parses and prints; the package `kimi_k3.convert` does the work. torch is imported by who converts.
"""

import json
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

if TYPE_CHECKING:
    from kimi_k3.convert import ConvertOptions
    from kimi_k3.convert.results import DryRun, Result

_T = TypeVar("_T")


class ScaleRule(StrEnum):
    """How the scale of a group is chosen."""

    MSE = "mse"
    ABSMAX = "absmax"


class Device(StrEnum):
    """Where the arithmetic is done."""

    CPU = "cpu"
    CUDA = "cuda"


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint's folder, or a cached hub id.")
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="New or empty folder for the int4 checkpoint.")
    ],
    scale_rule: Annotated[
        ScaleRule, typer.Option(help="mse: smallest error. absmax: AITER's rule, to compare with.")
    ] = ScaleRule.MSE,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: by cores and size.")
    ] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="One task per shard on a running Ray cluster; shared disks."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue or repair DST; proves what it keeps.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Prove DST: checksums, and everything converted again and compared. Of a "
            "finished DST nothing is written.",
        ),
    ] = False,
    device: Annotated[Device, typer.Option(help="cuda is ROCm too. The same bits.")] = Device.CPU,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Convert only modules with such names, e.g. `*.layers.1.*`; whole layers only. "
            "The others stay MXFP4, and config.json says which is which. Repeatable.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Leave such modules in MXFP4. Repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the source, print the plan, write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")] = False,
) -> None:
    """Convert a checkpoint's MXFP4 experts to int4 (groups of 32), once, without a GPU.

    SRC is any safetensors checkpoint in compressed-tensors' mxfp4-pack-quantized. DST gets
    pack-quantized int4 in place of every MXFP4 module; all else stays byte for byte. Every shard's
    header is checked before anything is written. A run that was stopped, in whatever way, goes on
    with --resume.

    Exit code 1 when it cannot be done or verified, 130 after Ctrl-C, 143 after SIGTERM,
    129 after SIGHUP.
    """
    from kimi_k3.convert import ConversionFailed, ConvertOptions
    from kimi_k3.convert.conversion import dry_run as plan_only
    from kimi_k3.convert.signals import Stopped, stops_interrupt

    try:
        options = ConvertOptions(
            scale_rule=scale_rule.value,
            workers=workers,
            ray=ray,
            resume=resume,
            verify=verify,
            device=device.value,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        folder = find_source(source)
        if dry_run:
            _print(plan_only(folder, destination, options), _show_plan, as_json)
            return
        with stops_interrupt():
            result = _work(folder, destination, options)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        then = "--resume goes on" if resume or not verify else "run it again"
        print(f"interrupted; finished shards are kept, {then}", file=sys.stderr)
        raise typer.Exit(128 + number) from None
    except ConversionFailed as error:
        _fail(str(error), error.problems, as_json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        then = "run it again" if dry_run or (verify and not resume) else "--resume goes on"
        _fail(f"{where}{error.strerror or error}. Once that is mended, {then}", [], as_json)
    _print(result, partial(_show_result, destination), as_json)


def find_source(text: str) -> Path:
    """The folder that SRC means: a path, or what the local hub cache has of a model.

    Raises:
        ConversionFailed: Neither.
    """
    from k3_checkpoint.files import NoSuchModelError, find_folder
    from kimi_k3.convert import ConversionFailed

    try:
        folder = find_folder(text)
    except NoSuchModelError:
        return Path(text)
    if folder is None:
        raise ConversionFailed(
            f"{text}: expected a checkpoint's folder or a model in the local hub cache, found "
            f"neither. Nothing is downloaded here: fetch it first, e.g. hf download {text}"
        )
    return folder


def _work(folder: Path, destination: Path, options: "ConvertOptions") -> "Result":
    from kimi_k3.convert import convert_checkpoint
    from kimi_k3.convert.destination import Destination
    from kimi_k3.convert.progress import terminal_progress
    from kimi_k3.convert.verify import verify_checkpoint

    with terminal_progress() as progress:
        finished = Destination(destination).state() == "finished"
        only_verify = options.verify and finished and not options.resume
        work = verify_checkpoint if only_verify else convert_checkpoint
        return work(folder, destination, options, progress)


def _fail(message: str, problems: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": message.splitlines()[0], "problems": problems}, indent=1))
    else:
        print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1)


def _print(found: _T, show: Callable[[_T], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))
    else:
        show(found)


def _show_result(destination: Path, result: "Result") -> None:
    print(
        f"{destination}: {result.done}; {result.modules:,} modules, "
        f"{result.bytes_in / 1e9:,.3f} GB to {result.bytes_out / 1e9:,.3f} GB in "
        f"{result.seconds:,.1f} s, scale rule {result.scale_rule}"
    )


def _show_plan(plan: "DryRun") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Shards", title_justify="left")
    table.add_column("shard", overflow="fold")
    for column in ("modules to convert", "GB in", "GB out"):
        table.add_column(column, justify="right")
    for name, shard in plan.shards.items():
        sizes = (f"{size / 1e9:,.3f}" for size in (shard.bytes_in, shard.bytes_out))
        table.add_row(name, f"{shard.modules:,}", *sizes)
    console = Console()
    console.print(table)
    kept = f", {plan.modules_kept:,} stay MXFP4" if plan.modules_kept else ""
    lines = f"""\
{plan.source} -> {plan.destination} ({plan.destination_state})
{plan.modules_to_convert:,} modules to int4 by {plan.scale_rule}{kept}
{plan.files_to_copy:,} other files to copy
{plan.bytes_in / 1e9:,.3f} GB in, {plan.bytes_out / 1e9:,.3f} GB out, \
{plan.bytes_free / 1e9:,.3f} GB free
workers: {plan.workers}, each under {plan.memory_per_worker_bytes / 2**30:.0f} GiB of memory
Nothing was written."""
    console.print(lines, highlight=False, markup=False)
