# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Proves what lies in a destination against its records and its source: everything for `--verify`,
the shards that may stay for `--resume` and repair. Writes nothing."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path, PurePosixPath

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.destination import Destination
from kimi_k3.convert.kernel import check_device
from kimi_k3.convert.manifest import FileRecord, Manifest, ShardRecord, read_regular
from kimi_k3.convert.options import ConversionFailed, ConvertOptions, shown
from kimi_k3.convert.pool import run_jobs
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.results import Result
from kimi_k3.convert.source import NOT_COPIED, WORK_NAME
from kimi_k3.convert.work_plan import Plan, make_plan

_MOST_THREADS = 8


def verify_checkpoint(
    source: Path,
    destination: Path,
    options: ConvertOptions,
    progress: Progress | None = None,
) -> Result:
    """Prove a result.

    Every field of the manifest is compared with the source, every file's SHA-256 with the
    manifest's, those of the source's files too. Every module is converted again and compared byte
    for byte, and so is every tensor that was copied, config.json and the index. Files that no
    conversion wrote are named. One module of each shape in each shard goes through
    compressed-tensors' own decompression, where that is installed.

    Args:
        source: The source; where it lies does not matter.
        destination: A finished conversion.
        options: Workers and device; what was converted, and by which rule, the manifest says.
        progress: Who is told.

    Returns:
        What was proven.

    Raises:
        ConversionFailed: Names every file that is not what it should be.
    """
    started = time.monotonic()
    progress = progress or Progress()
    target = Destination(destination)
    manifest = target.manifest()
    chosen = replace(
        options,
        scale_rule=manifest.scale_rule,
        include=manifest.include,
        exclude=manifest.exclude,
    )
    plan = make_plan(source, chosen, target.folder)
    if not options.ray:
        check_device(options.device)
    problems = [*_only_one(manifest.shards, plan.layouts)]
    for name in plan.layouts:
        if name in manifest.shards:
            problems += _named(name, header_problems(plan, name, manifest.shards[name]))
    problems += _check_files(plan, target, manifest)
    if Path(manifest.source).is_relative_to(target.folder):
        problems.append("source: the manifest names the destination itself as its source")
    elif manifest.source != str(plan.source.folder):
        progress.note(
            f"the manifest names {shown(manifest.source)} as its source; this proof is against "
            f"{shown(plan.source.folder)}"
        )
    problems += _check_shards(plan, target, manifest, progress)
    if problems:
        raise ConversionFailed(
            f"{shown(target.folder)} is not what its manifest and its source say, "
            + ("1 problem:" if len(problems) == 1 else f"{len(problems)} problems:"),
            problems,
            "Run again with --resume to write the named shards anew. If it is the source that "
            "changed, fetch it again, or convert it into a new folder.",
        )
    seconds = time.monotonic() - started
    return Result.of(manifest, target.folder, seconds, converted=None, verified=True)


def proven_shards(plan: Plan, target: Destination, progress: Progress) -> dict[str, ShardRecord]:
    """Shards of an earlier run that stay, since their checksums and their sources' are as recorded.

    A note says why another shard, which that run had finished, is converted again.
    """
    try:
        finished = target.manifest().shards
    except ConversionFailed:
        finished = {}
    claimed: dict[str, ShardRecord] = {}
    by_manifest: set[str] = set()

    def drop(name: str, reason: str) -> None:
        progress.note(f"{shown(name)}: {reason}; it is converted again")
        claimed.pop(name, None)

    for name in plan.layouts:
        record = finished.get(name)
        try:
            note = target.read_note(name)
        except ValueError:
            note = None
            if record is None:
                drop(name, "what was noted down of it is damaged")
        if note is not None:
            record = note.record
        elif record is not None:
            by_manifest.add(name)
        else:
            continue
        if note is not None and note.stamps != plan.stamps(name):
            drop(name, "its source has changed")
        elif wrong := next(header_problems(plan, name, record), None):
            drop(name, f"what was noted down of it is wrong, {wrong}")
        else:
            claimed[name] = record
    if not claimed:
        return {}
    # A manifest knows no times. Its shards are of one state of the source, and of this one, only
    # if every byte that they were made of is the same.
    sources = {file for name in claimed.keys() & by_manifest for file in plan.needed(name)}
    size = sum(record.result.bytes for record in claimed.values())
    size += sum(plan.source.headers[file].size for file in sources)
    progress.phase("proving what is there", size)

    def prove(name: str) -> str | None:
        return file_problem(target.folder / name, claimed[name].result, claimed, progress.advance)

    def has_changed(file: str) -> bool:
        now = FileRecord.of(plan.source.folder / file, progress.advance)
        return file not in finished or finished[file].source != now

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        of_sources = threads.map(has_changed, sources)
        problems = dict(zip(claimed, threads.map(prove, claimed), strict=True))
        changed = {file for file, differs in zip(sources, of_sources, strict=True) if differs}
    for name, problem in problems.items():
        others = sorted(changed.intersection(plan.needed(name))) if name in by_manifest else []
        if problem is not None:
            drop(name, problem)
        elif others:
            drop(name, f"{shown(others[0])} of the source has not the manifest's SHA-256")
    return claimed


def header_problems(plan: Plan, name: str, record: ShardRecord) -> Iterator[str]:
    """Fields of a shard's record that headers alone disprove."""
    header, modules = plan.source.headers[name], tuple(m.name for m in plan.modules[name])
    if record.source_header != header.digest:
        # Nothing else can be right then.
        yield "the source's header is another one than then"
        return
    for field, found, expected in (
        ("source.bytes", record.source.bytes, header.size),
        ("result.bytes", record.result.bytes, plan.layouts[name].size),
    ):
        if found != expected:
            yield f"{field}: expected {expected:,}, found {found:,}"
    if record.modules != modules:
        differ = sorted({*record.modules} ^ {*modules})[:1]
        at = f", e.g. {shown(differ[0])}" if differ else ""
        yield f"modules: expected {len(modules):,}, found {len(record.modules):,}{at}"


def file_problem(
    file: Path,
    expected: FileRecord,
    shards: Mapping[str, ShardRecord],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> str | None:
    """What is wrong with a file, or None.

    Args:
        file: Of the result.
        expected: Its record.
        shards: Records of the result's shards, for one that lies under another's name.
        on_bytes: Told of bytes as they are read.
    """
    if not file.is_file():
        return "no regular file" if file.exists() else "not there"
    size = file.stat().st_size
    if size in (expected.bytes, *(record.result.bytes for record in shards.values())):
        found = FileRecord.of(file, on_bytes)
        if found == expected:
            return None
        if other := _shard_of(found, shards):
            return f"holds the bytes of {shown(other)}"
        if size == expected.bytes:
            return f"damaged, expected SHA-256 {expected.sha256}, found {found.sha256}"
    state = "truncated" if size < expected.bytes else "too long"
    return f"{state}, expected {expected.bytes:,} bytes, found {size:,}"


def unexpected_entries(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """What lies in a folder beside the named files, in order; links to folders are not followed.

    What tools that fetch checkpoints leave behind is left out, and so is the hidden folder of an
    unfinished conversion.
    """
    known = set(names)
    folders = {str(above) for name in known for above in PurePosixPath(name).parents}

    def walk(at: Path) -> Iterator[str]:
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            path = at / entry.name
            name = str(path.relative_to(folder))
            if entry.name in NOT_COPIED or name == WORK_NAME or name in known:
                continue
            if name in folders and entry.is_dir(follow_symlinks=False):
                yield from walk(path)
            else:
                yield name

    yield from walk(folder)


def _shard_of(found: FileRecord, shards: Mapping[str, ShardRecord]) -> str | None:
    return next((name for name, record in shards.items() if record.result == found), None)


def _named(name: str, problems: Iterable[str]) -> Iterator[str]:
    return (f"{shown(name)}: {problem}" for problem in problems)


def _only_one(then: Iterable[str], now: Iterable[str]) -> Iterator[str]:
    """Files that only the manifest names, or only the source has."""
    then, now = set(then), set(now)
    for name in sorted(then ^ now):
        there, missing = ("source", "manifest") if name in now else ("manifest", "source")
        yield f"{shown(name)}: in the {there}, and not in the {missing}"


def _check_shards(
    plan: Plan, target: Destination, manifest: Manifest, progress: Progress
) -> Iterator[str]:
    """Convert all shards again whose size is right, and compare."""
    jobs = []
    for name, record in manifest.shards.items():
        path = target.folder / name
        if name not in plan.layouts:
            continue
        if path.is_file() and path.stat().st_size == record.result.bytes:
            jobs.append(plan.job(name, path, record))
        elif problem := file_problem(path, record.result, manifest.shards):
            yield f"{shown(name)}: {problem}"
    size = sum(plan.source.headers[job.name].size for job in jobs)
    progress.phase("verifying", size)
    with closing(run_jobs(jobs, plan.options, size, progress.advance)) as outcomes:
        for done, outcome in enumerate(outcomes, start=1):
            problems = outcome.problems
            if outcome.record is not None and problems:
                other = _shard_of(outcome.record.result, manifest.shards)
                if other not in (None, outcome.name):
                    problems = [f"holds the bytes of {shown(str(other))}"]
            yield from _named(outcome.name, problems)
            if outcome.error is not None:
                yield outcome.error
            progress.shard(outcome.name, done, len(jobs))


def _check_files(plan: Plan, target: Destination, manifest: Manifest) -> Iterator[str]:
    """Everything beside the shards."""
    config = plan.config_text()
    wanted = {name: FileRecord.of(plan.source.folder / name) for name in plan.source.others}
    wanted["config.json"] = FileRecord(len(config), sha256(config).hexdigest())
    yield from _only_one(manifest.files, wanted)
    for name, record in wanted.items():
        if manifest.files.get(name, record) != record:
            yield f"{shown(name)}: the manifest has another size or SHA-256 of it"
        if problem := file_problem(target.folder / name, record, {}):
            yield f"{shown(name)}: {problem}"
    try:
        if read_regular(target.folder / INDEX_NAME) != plan.index_text():
            yield f"{INDEX_NAME}: not what the conversion of this source writes"
    except FileNotFoundError:
        yield f"{INDEX_NAME}: not there"
    except ValueError as error:
        yield f"{INDEX_NAME}: {error}"
    known = {*manifest.shards, *manifest.files, *plan.result_names}
    for name in unexpected_entries(target.folder, known):
        yield f"{shown(name)}: not of this conversion; remove it"
    if (target.folder / WORK_NAME).exists():
        yield f"{WORK_NAME}: there, so a run is not finished"
