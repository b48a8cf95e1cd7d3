# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which shards of an earlier run stay: those that are proven, byte for byte, by their checksum. And
what lies beside them that no run wrote."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from kimi_k3.convert.destination import Destination, Stamp, digest_file
from kimi_k3.convert.manifest import FileRecord, ShardRecord
from kimi_k3.convert.options import shown
from kimi_k3.convert.plan import Plan
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.source import NOT_COPIED, WORK_NAME

_MOST_THREADS = 8


def prove_kept(plan: Plan, target: Destination, progress: Progress) -> dict[str, ShardRecord]:
    """Shards that are finished; of the others that an earlier run had finished, a note says why
    they are converted again."""
    finished = target.finished_records()
    claimed: dict[str, ShardRecord] = {}
    by_manifest: set[str] = set()

    def drop(name: str, reason: str) -> None:
        progress.note(f"{shown(name)}: {reason}; it is converted again")
        claimed.pop(name, None)

    for name in plan.layouts:
        remembered = target.remembered(name)
        record = finished.get(name)
        if remembered is not None:
            record, stamps = remembered
            if stamps != {f: Stamp.of(plan.source.folder / f) for f in sorted(plan.needed(name))}:
                drop(name, "its source has changed")
                continue
        elif record is not None:
            by_manifest.add(name)
        else:
            if target.is_noted(name):
                drop(name, "what was noted down of it is damaged")
            continue
        wrong = next(unlike(plan, name, record), None)
        if wrong is None:
            claimed[name] = record
        else:
            drop(name, f"what was noted down of it is wrong, {wrong}")
    if not claimed:
        return {}
    results = sum(record.result.bytes for record in claimed.values())
    # A manifest knows no times. Its shards are of one state of the source, and of this one, only
    # if every byte that they were made of is the same.
    sources = {
        file: plan.source.headers[file].size
        for name in claimed.keys() & by_manifest
        for file in plan.needed(name)
    }
    progress.phase("proving what is there", results + sum(sources.values()))

    def prove(name: str) -> str | None:
        return judge(target.folder / name, claimed[name].result, claimed, progress.advance)

    def is_same(file: str) -> bool:
        record = finished.get(file)
        path = plan.source.folder / file
        return record is not None and digest_file(path, progress.advance) == record.source

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        same = threads.map(is_same, sources)
        problems = dict(zip(claimed, threads.map(prove, claimed), strict=True))
        changed = {file for file, proven in zip(sources, same, strict=True) if not proven}
    for name, problem in problems.items():
        others = sorted(changed.intersection(plan.needed(name))) if name in by_manifest else []
        if problem is not None:
            drop(name, problem)
        elif others:
            drop(name, f"{shown(others[0])} of the source has not the manifest's SHA-256")
    return claimed


def unlike(plan: Plan, name: str, record: ShardRecord) -> Iterator[str]:
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


def judge(
    file: Path,
    expected: FileRecord,
    others: dict[str, ShardRecord],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> str | None:
    """What is wrong with a file, or None.

    Args:
        file: Of the result.
        expected: Its record.
        others: Records of the result's shards, for one that lies under another's name.
        on_bytes: Told of bytes as they are read.
    """
    if not file.is_file():
        return "no regular file" if file.exists() else "not there"
    size = file.stat().st_size
    found = None
    if size == expected.bytes:
        found = digest_file(file, on_bytes)
        if found == expected:
            return None
    elif any(size == record.result.bytes for record in others.values()):
        found = digest_file(file)
    for name, record in others.items():
        if found == record.result:
            return f"holds the bytes of {shown(name)}"
    if size != expected.bytes:
        state = "truncated" if size < expected.bytes else "too long"
        return f"{state}, expected {expected.bytes:,} bytes, found {size:,}"
    assert found is not None
    return f"damaged, expected SHA-256 {expected.sha256}, found {found.sha256}"


def strangers(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """What lies in a folder beside the named files, in order; links to folders are not followed.

    What tools that fetch checkpoints leave behind is nobody's business, and of the hidden folder
    others tell.
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
