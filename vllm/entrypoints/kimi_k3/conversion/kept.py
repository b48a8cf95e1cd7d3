# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which shards of an earlier run stay: those that are proven, byte for byte, by their checksum."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm.entrypoints.kimi_k3.conversion.destination import Destination, Stamp, digest_file
from vllm.entrypoints.kimi_k3.conversion.manifest import FileRecord, ShardRecord
from vllm.entrypoints.kimi_k3.conversion.options import shown
from vllm.entrypoints.kimi_k3.conversion.plan import Plan
from vllm.entrypoints.kimi_k3.conversion.progress import Progress

_MOST_THREADS = 8


def prove_kept(plan: Plan, target: Destination, progress: Progress) -> dict[str, ShardRecord]:
    """Shards that are finished; of the others that an earlier run had finished, a note says why
    they are converted again."""
    finished = target.finished_records()
    claimed: dict[str, ShardRecord] = {}
    for name in plan.layouts:
        remembered = target.remembered(name)
        if remembered is not None:
            record, stamps = remembered
            now = {f: Stamp.of(plan.source.folder / f) for f in sorted(plan.needed(name))}
            if stamps == now:
                claimed[name] = record
            else:
                progress.note(f"{shown(name)}: its source has changed; it is converted again")
        elif name in finished:
            claimed[name] = finished[name]
    if not claimed:
        return {}
    size = sum(record.result.bytes for record in claimed.values())
    progress.phase("proving what is there", size)

    def prove(name: str) -> str | None:
        return judge(target.folder / name, claimed[name].result, claimed, progress.advance)

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        problems = dict(zip(claimed, threads.map(prove, claimed), strict=True))
    for name, problem in problems.items():
        if problem is not None:
            progress.note(f"{shown(name)}: {problem}; it is converted again")
            del claimed[name]
    return claimed


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
        return "not there"
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
