# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 convert`: the int4 checkpoint, once and offline.

Parses and prints; the package `conversion` does the work. torch is imported by who converts.
"""

import json
import signal
import sys
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kimi_k3.convert import ConvertOptions, Manifest
    from kimi_k3.convert.plan import Plan


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
    from kimi_k3.convert.signals import Stopped, stops_interrupt

    started = time.monotonic()
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
            _print_plan(folder, destination, options, as_json)
            return
        with stops_interrupt():
            manifest, done = _work(folder, destination, options)
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
    _print_done(destination, manifest, done, time.monotonic() - started, as_json)


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


def _work(folder: Path, destination: Path, options: "ConvertOptions") -> tuple["Manifest", str]:
    from kimi_k3.convert.destination import Destination
    from kimi_k3.convert.run import convert_checkpoint
    from kimi_k3.convert.terminal import terminal_progress
    from kimi_k3.convert.verify import verify_checkpoint

    with terminal_progress() as progress:
        finished = Destination(destination).state() == "finished"
        if options.verify and finished and not options.resume:
            manifest = verify_checkpoint(folder, destination, options, progress)
            return manifest, f"all {len(manifest.shards)} shards verified"
        manifest = convert_checkpoint(folder, destination, replace(options, verify=False), progress)
        done = f"{progress.shards} of {len(manifest.shards)} shards converted"
        if progress.shards < len(manifest.shards):
            done += ", the others kept"
        if options.verify:
            verify_checkpoint(folder, destination, options, progress)
            done += ", all verified"
        return manifest, done


def _fail(message: str, problems: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": message.splitlines()[0], "problems": problems}, indent=1))
    else:
        print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1)


def _print_done(
    destination: Path, manifest: "Manifest", done: str, seconds: float, as_json: bool
) -> None:
    size = sum(record.source.bytes for record in manifest.shards.values())
    result = sum(record.result.bytes for record in manifest.shards.values())
    modules = {name for record in manifest.shards.values() for name in record.modules}
    if as_json:
        found: dict[str, Any] = {
            "done": done,
            "destination": str(destination.resolve()),
            "source": manifest.source,
            "scale_rule": manifest.scale_rule,
            "modules": len(modules),
            "shards": len(manifest.shards),
            "bytes_in": size,
            "bytes_out": result,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(found, indent=1))
        return
    print(
        f"{destination}: {done}; {len(modules):,} modules, "
        f"{size / 1e9:,.3f} GB to {result / 1e9:,.3f} GB in {seconds:,.1f} s, "
        f"scale rule {manifest.scale_rule}"
    )


def _print_plan(folder: Path, destination: Path, options: "ConvertOptions", as_json: bool) -> None:
    from kimi_k3.convert.destination import Destination
    from kimi_k3.convert.options import resolved
    from kimi_k3.convert.plan import make_plan
    from kimi_k3.convert.run import worker_count

    target = Destination(destination)
    target.check_apart(resolved(folder))
    plan = make_plan(folder, options, target.folder)
    target.check_entries(plan.result_names)
    workers = worker_count(options, len(plan.layouts), plan.source_bytes)
    found = plan.as_dict() | {
        "destination": str(target.folder),
        "destination_state": target.state(),
        "bytes_free": target.free_bytes(),
        "workers": workers,
    }
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_table(plan, found)


def _print_table(plan: "Plan", found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Shards", title_justify="left")
    table.add_column("shard", overflow="fold")
    for column in ("modules to convert", "GB in", "GB out"):
        table.add_column(column, justify="right")
    for name, shard in found["shards"].items():
        sizes = (f"{shard[key] / 1e9:,.3f}" for key in ("bytes_in", "bytes_out"))
        table.add_row(name, f"{shard['modules']:,}", *sizes)
    console = Console()
    console.print(table)
    kept = f", {found['modules_kept']:,} stay MXFP4" if found["modules_kept"] else ""
    per_worker = found["memory_per_worker_bytes"] / 2**30
    lines = f"""\
{found["source"]} -> {found["destination"]} ({found["destination_state"]})
{found["modules_to_convert"]:,} modules to int4 by {found["scale_rule"]}{kept}
{found["files_to_copy"]:,} other files to copy
{found["bytes_in"] / 1e9:,.3f} GB in, {found["bytes_out"] / 1e9:,.3f} GB out, \
{found["bytes_free"] / 1e9:,.3f} GB free
workers: {found["workers"]}, each under {per_worker:.0f} GiB of memory
Nothing was written."""
    console.print(lines, highlight=False, markup=False)
