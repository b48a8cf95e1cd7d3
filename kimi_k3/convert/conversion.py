# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`convert_checkpoint`: everything is judged before a byte is written, and the index comes last."""

import errno
import importlib.metadata
import time
from contextlib import closing
from pathlib import Path

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.destination import Destination
from kimi_k3.convert.kernel import check_device
from kimi_k3.convert.manifest import MANIFEST_NAME, FileRecord, Manifest, ShardNote, ShardRecord
from kimi_k3.convert.options import ConversionFailed, ConvertOptions, resolved, shown
from kimi_k3.convert.pool import run_jobs, worker_count
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.ray_tasks import connect
from kimi_k3.convert.results import DryRun, Result, ShardSize
from kimi_k3.convert.verify import proven_shards, unexpected_entries, verify_checkpoint
from kimi_k3.convert.work_plan import Plan, make_plan

_TOOLS = ("vllm-kimi-k3", "torch")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESUME = "The finished shards are kept; run again with --resume."
# Resident memory of one worker at most, measured (docs/convert.md); most of it is torch's code.
_WORKER_BYTES = 1 << 30


def convert_checkpoint(
    source: Path,
    destination: Path,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
) -> Result:
    """Convert a checkpoint's MXFP4 modules to int4 and copy all else.

    Args:
        source: Folder with config.json and safetensors shards; links are followed.
        destination: New or empty, or begun by an earlier run and ``options.resume``.
        options: How.
        progress: Who is told.

    Returns:
        What was done.

    Raises:
        ConversionFailed: It cannot be done; nothing was written, or what was can be resumed.
        OSError: A file cannot be read or written; finished shards are kept for a resume.
    """
    started = time.monotonic()
    options, progress = options or ConvertOptions(), progress or Progress()
    target = Destination(destination)
    target.check_apart(resolved(source))
    target.check_may_begin(options.resume)
    plan = make_plan(source, options, target.folder)
    target.check_entries(plan.result_names)
    needed, free = _missing_bytes(plan, target) + plan.other_bytes, target.free_bytes()
    if needed > free:
        raise ConversionFailed(
            f"{shown(target.folder)}: expected {needed:,} bytes free for {plan.result_bytes:,} "
            f"bytes of shards and the files beside them, found {free:,}. Nothing was written. "
            "Free some, or name a folder on another disk"
        )
    if options.ray:
        connect()
    else:
        check_device(options.device)
    with target.locked() as lock:
        target.check_may_begin(options.resume)
        target.check_entries(plan.result_names)
        target.begin(plan.fingerprint())
        target.sweep()
        try:
            records = proven_shards(plan, target, progress)
            # Not before all else was judged: until here a finished checkpoint stays one.
            target.withdraw_index()
            waiting = [name for name in plan.layouts if name not in records]
            records |= _convert(plan, target, waiting, progress, lock)
            manifest = _complete(plan, target, records)
        except OSError as error:
            if error.errno in _FULL:
                where = str(error.filename or target.folder)
                raise _no_space(plan, target, where) from error
            raise
        for name in unexpected_entries(target.folder, plan.result_names):
            progress.note(f"{shown(name)}: not of this conversion; it is left as it is")
        target.finish()
    if options.verify:
        verify_checkpoint(source, destination, options, progress)
    seconds = time.monotonic() - started
    return Result.of(manifest, target.folder, seconds, len(waiting), options.verify)


def dry_run(source: Path, destination: Path, options: ConvertOptions) -> DryRun:
    """Check a source and plan its conversion; writes nothing.

    Raises:
        ConversionFailed: It could not be converted, or not there.
        OSError: A file cannot be read.
    """
    target = Destination(destination)
    target.check_apart(resolved(source))
    plan = make_plan(source, options, target.folder)
    target.check_entries(plan.result_names)
    headers = plan.source.headers
    return DryRun(
        source=str(plan.source.folder),
        scale_rule=options.scale_rule,
        modules_to_convert=len(plan.selection.modules),
        modules_kept=len(plan.source.modules) - len(plan.selection.modules),
        tensors=sum(len(header.entries) for header in headers.values()),
        files_to_copy=len(plan.source.others),
        bytes_in=plan.source_bytes + plan.other_bytes,
        bytes_out=plan.result_bytes + plan.other_bytes,
        memory_per_worker_bytes=_WORKER_BYTES,
        shards={
            name: ShardSize(headers[name].size, layout.size, len(plan.modules[name]))
            for name, layout in plan.layouts.items()
        },
        destination=str(target.folder),
        destination_state=target.state(),
        bytes_free=target.free_bytes(),
        workers=worker_count(options, len(plan.layouts), plan.source_bytes),
    )


def _convert(
    plan: Plan, target: Destination, names: list[str], progress: Progress, lock: int
) -> dict[str, ShardRecord]:
    """Convert shards; every one that can be converted is, whatever becomes of the others."""
    stamps = {name: plan.stamps(name) for name in names}
    paths = {name: target.partial_path() for name in names}
    jobs = [plan.job(name, paths[name]) for name in names]
    size = sum(plan.source.headers[name].size for name in names)
    total, finished = len(plan.layouts), len(plan.layouts) - len(names)
    progress.phase("converting", size)
    records: dict[str, ShardRecord] = {}
    problems: list[str] = []
    # Closed whatever happens here, so that no worker writes on while its file is removed.
    with closing(run_jobs(jobs, plan.options, size, progress.advance, (lock,))) as outcomes:
        for outcome in outcomes:
            name, record = outcome.name, outcome.record
            if record is None:
                if outcome.errno in _FULL:
                    raise _no_space(plan, target, name)
                problems.append(outcome.error or f"{shown(name)}: not converted")
                paths[name].unlink(missing_ok=True)
                continue
            header = plan.source.headers[name].digest
            if plan.stamps(name) != stamps[name] or record.source_header != header:
                problems.append(f"{shown(name)}: its source changed while it was read")
                continue
            records[name] = record
            target.write_note(name, ShardNote(record, stamps[name]))
            target.place(paths[name], name)
            finished += 1
            progress.shard(name, finished, total)
    if problems:
        raise ConversionFailed(
            f"{len(problems)} of {total} shards could not be converted:", problems, _RESUME
        )
    return records


def _missing_bytes(plan: Plan, target: Destination) -> int:
    """Bytes of the shards that are not there yet."""
    sizes = {name: layout.size for name, layout in plan.layouts.items()}
    return sum(size for name, size in sizes.items() if not (target.folder / name).is_file())


def _no_space(plan: Plan, target: Destination, where: str) -> ConversionFailed:
    return ConversionFailed(
        f"{shown(where)}: no space left, or a limit on file sizes was reached, in "
        f"{shown(target.folder)}. The shards still to be written take "
        f"{_missing_bytes(plan, target):,} bytes; {target.free_bytes():,} are free. What was "
        f"incomplete was removed. {_RESUME}"
    )


def _complete(plan: Plan, target: Destination, records: dict[str, ShardRecord]) -> Manifest:
    """Write everything but the shards; the index last."""
    files: dict[str, FileRecord] = {
        name: target.copy(plan.source.folder / name, name) for name in plan.source.others
    }
    files["config.json"] = target.write("config.json", plan.config_text())
    options = plan.options
    manifest = Manifest(
        source=str(plan.source.folder),
        scale_rule=options.scale_rule,
        include=options.include,
        exclude=options.exclude,
        shards={name: records[name] for name in plan.layouts},
        files=files,
        tools={name: importlib.metadata.version(name) for name in _TOOLS},
    )
    target.write(MANIFEST_NAME, manifest.text().encode())
    target.write(INDEX_NAME, plan.index_text())
    return manifest
