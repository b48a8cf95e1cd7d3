# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`convert_checkpoint`: everything is judged before a byte is written, and the index comes last."""

import errno
import importlib.metadata
import os
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.destination import Destination, Stamp
from kimi_k3.convert.kept import prove_kept, strangers
from kimi_k3.convert.kernel import check_device
from kimi_k3.convert.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    ShardRecord,
)
from kimi_k3.convert.options import (
    ConversionFailed,
    ConvertOptions,
    resolved,
    shown,
)
from kimi_k3.convert.plan import Plan, check_same, fingerprint, make_plan
from kimi_k3.convert.pool import Outcome, run_here, run_workers
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.shard import Job
from kimi_k3.convert.verify import verify_checkpoint

_TOOLS = ("vllm-kimi-k3", "torch")
# Below this one process is done before another has imported torch.
_ALONE_BYTES = 1 << 30
# More workers read and write more shards at once than disks like; their threads fill the cores.
_MOST_WORKERS = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESUME = "The finished shards are kept; run again with --resume."


def convert_checkpoint(
    source: Path,
    destination: Path,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Convert a checkpoint's MXFP4 modules to int4 and copy all else.

    Args:
        source: Folder with config.json and safetensors shards; links are followed.
        destination: New or empty, or begun by an earlier run and ``options.resume``.
        options: How.
        progress: Who is told.

    Returns:
        The manifest, as it stands in the destination.

    Raises:
        ConversionFailed: It cannot be done; nothing was written, or what was can be resumed.
        OSError: A file cannot be read or written; finished shards are kept for a resume.
    """
    options, progress = options or ConvertOptions(), progress or Progress()
    target = Destination(destination)
    target.check_apart(resolved(source))
    target.check_may_begin(options.resume)
    plan = make_plan(source, options, target.folder)
    target.check_entries(plan.result_names)
    _check_space(plan, target)
    if options.ray:
        from kimi_k3.convert.ray_tasks import connect

        connect()
    else:
        check_device(options.device)
    with target.locked() as lock:
        target.check_may_begin(options.resume)
        target.check_entries(plan.result_names)
        _agree(plan, target)
        target.sweep()
        try:
            records = prove_kept(plan, target, progress)
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
        for name in strangers(target.folder, plan.result_names):
            progress.note(f"{shown(name)}: not of this conversion; it is left as it is")
        target.finish()
    if options.verify:
        verify_checkpoint(source, destination, options, progress)
    return manifest


def worker_count(options: ConvertOptions, shards: int, size: int) -> int:
    """How many processes share so many shards of so many bytes in all."""
    if options.workers is not None:
        return min(options.workers, max(1, shards))
    if size < _ALONE_BYTES:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), shards, _MOST_WORKERS))


def outcomes(
    jobs: list[Job], options: ConvertOptions, size: int, progress: Progress, *locks: int
) -> Generator[Outcome]:
    """Do the jobs wherever the options say."""
    if options.ray:
        from kimi_k3.convert.ray_tasks import run_ray

        return run_ray(jobs, progress.advance)
    workers = worker_count(options, len(jobs), size)
    if workers == 1:
        return run_here(jobs, progress.advance)
    return run_workers(jobs, workers, progress.advance, locks)


def _agree(plan: Plan, target: Destination) -> None:
    """Write down what is being done, or compare it with what an earlier run has written down."""
    earlier = target.read_plan()
    if earlier is None and (target.folder / MANIFEST_NAME).exists():
        earlier = fingerprint(target.manifest())
    if earlier is not None:
        check_same(target.folder, earlier, plan)
    target.write_plan(plan.fingerprint())


def _convert(
    plan: Plan, target: Destination, names: list[str], progress: Progress, lock: int
) -> dict[str, ShardRecord]:
    """Convert shards; every one that can be converted is, whatever becomes of the others."""
    stamps = {name: stamp_sources(plan, name) for name in names}
    paths = {name: target.partial_path() for name in names}
    jobs = [plan.job(name, paths[name]) for name in names]
    size = sum(plan.source.headers[name].size for name in names)
    total, finished = len(plan.layouts), len(plan.layouts) - len(names)
    progress.phase("converting", size)
    records: dict[str, ShardRecord] = {}
    problems: list[str] = []
    # Closed whatever happens here, so that no worker writes on while its file is removed.
    with closing(outcomes(jobs, plan.options, size, progress, lock)) as done:
        for outcome in done:
            name, found = outcome.name, outcome.found
            if "error" in found:
                if found.get("errno") in _FULL:
                    raise _no_space(plan, target, name)
                problems.append(found["error"])
                paths[name].unlink(missing_ok=True)
                continue
            header = plan.source.headers[name].digest
            if (
                stamp_sources(plan, name) != stamps[name]
                or found["record"]["source_header"] != header
            ):
                problems.append(f"{shown(name)}: its source changed while it was read")
                continue
            records[name] = ShardRecord.from_json(found["record"])
            target.remember(name, records[name], stamps[name])
            target.place(paths[name], name)
            finished += 1
            progress.shard(name, finished, total)
    if problems:
        raise ConversionFailed(
            f"{len(problems)} of {total} shards could not be converted:", problems, _RESUME
        )
    return records


def stamp_sources(plan: Plan, name: str) -> dict[str, Stamp]:
    """Stamps of the source files that a result shard is made of."""
    return {file: Stamp.of(plan.source.folder / file) for file in sorted(plan.needed(name))}


def _check_space(plan: Plan, target: Destination) -> None:
    missing = sum(
        layout.size for name, layout in plan.layouts.items() if not (target.folder / name).is_file()
    )
    needed, free = missing + plan.other_bytes, target.free_bytes()
    if needed > free:
        raise ConversionFailed(
            f"{shown(target.folder)}: expected {needed:,} bytes free for {plan.result_bytes:,} "
            f"bytes of shards and the files beside them, found {free:,}. Nothing was written. "
            "Free some, or name a folder on another disk"
        )


def _no_space(plan: Plan, target: Destination, where: str) -> ConversionFailed:
    missing = sum(
        layout.size for name, layout in plan.layouts.items() if not (target.folder / name).is_file()
    )
    return ConversionFailed(
        f"{shown(where)}: no space left, or a limit on file sizes was reached, in "
        f"{shown(target.folder)}. The shards still to be written take {missing:,} bytes; "
        f"{target.free_bytes():,} are free. What was incomplete was removed. {_RESUME}"
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
