# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The folder that a conversion writes into: who may, what is there, and how files get there.

Every file comes to its name by a rename, complete and on disk. What is unfinished, and what a later
run must know of the finished, lies in one hidden folder that the last step removes.
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from vllm.entrypoints.kimi_k3.checkpoint.shards import INDEX_NAME
from vllm.entrypoints.kimi_k3.conversion.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    ShardRecord,
)
from vllm.entrypoints.kimi_k3.conversion.options import ConversionFailed, shown
from vllm.entrypoints.kimi_k3.conversion.source import WORK_NAME

COPY_PIECE = 8 << 20
_PLAN = "plan.json"
_RECORD = ".shard.json"
_LOCK = "lock"
# A run that was killed holds the lock until its last worker is gone, which takes a moment.
_LOCK_WAIT = 3.0


@dataclass(frozen=True)
class Stamp:
    """By what a change of a source file is noticed without reading it."""

    bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path) -> "Stamp":
        """The stamp of a file, links followed."""
        status = file.stat()
        return cls(status.st_size, status.st_mtime_ns)


class Destination:
    """A folder under conversion."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.work = self.folder / WORK_NAME

    def check_apart(self, source: Path) -> None:
        """Refuse a destination that is the source, or lies in it or around it.

        Raises:
            ConversionFailed: Either lies in the other.
        """
        for inner, outer in ((self.folder, source), (source, self.folder)):
            for place in (inner, *inner.parents):
                if place.exists() and outer.exists() and place.samefile(outer):
                    raise ConversionFailed(
                        f"{shown(self.folder)}: expected a destination apart from the source "
                        f"{shown(source)}, found one "
                        + ("that is the source" if place == inner else "inside the other")
                        + ". Nothing was written"
                    )

    def state(self) -> str:
        """ "new", "begun", "finished" or "foreign"."""
        if not self.folder.exists():
            return "new"
        if not self.folder.is_dir():
            raise ConversionFailed(f"{shown(self.folder)}: expected a folder, found a file")
        if self.work.is_symlink():
            # Not ours, and nothing may be swept where it leads.
            return "foreign"
        if (self.work / _PLAN).exists():
            return "begun"
        if (self.folder / MANIFEST_NAME).exists():
            return "finished"
        return "foreign" if any(f.name != WORK_NAME for f in self.folder.iterdir()) else "new"

    def check_may_begin(self, resume: bool) -> None:
        """Refuse a folder with files in it, unless they are ours and the run is to continue.

        Raises:
            ConversionFailed: Says which of the cases it is.
        """
        state = self.state()
        if state == "new" or (resume and state in ("begun", "finished")):
            return
        what, then = {
            "begun": ("an unfinished conversion", "Run again with --resume to continue it"),
            "finished": (
                "a finished conversion",
                "Run with --verify to prove it, or with --resume to repair it",
            ),
            "foreign": (
                "files that no conversion of this tool wrote",
                "Name a new or empty folder",
            ),
        }[state]
        raise ConversionFailed(
            f"{shown(self.folder)}: expected a new or empty folder, found {what}. Nothing was "
            f"written. {then}"
        )

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Make the folder, and hold it against other runs; the kernel lets go if this one dies.

        Yields:
            The lock's descriptor, which workers inherit so that it outlives a killed parent.

        Raises:
            ConversionFailed: Another run holds it.
        """
        made = not self.folder.exists()
        try:
            lock = self._lock()
        except OSError as error:
            raise ConversionFailed(
                f"{shown(self.folder)}: cannot be written: {error.strerror}. Nothing was written"
            ) from error
        try:
            yield lock
        finally:
            self._leave(made)
            os.close(lock)

    def _leave(self, made: bool) -> None:
        """After a run that did not finish: keep what a later run can use, and no more."""
        if not self.work.is_dir():
            return
        self.sweep()
        if not any(self.work.glob(f"*{_RECORD}")):
            (self.work / _PLAN).unlink(missing_ok=True)
        if not (self.work / _PLAN).exists():
            self.finish()
            if made:
                self.folder.rmdir()

    def _lock(self) -> int:
        path = self.work / _LOCK
        deadline = time.monotonic() + _LOCK_WAIT
        while True:
            self.work.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The run before may have finished and removed the file in between.
                if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(lock)
                    raise
            os.close(lock)
            if time.monotonic() > deadline:
                raise ConversionFailed(
                    f"{shown(self.folder)}: another process is converting into this folder. "
                    "Nothing was written. Wait for it, or name another folder"
                )
            time.sleep(0.05)

    def read_plan(self) -> dict[str, Any] | None:
        """What an earlier run has written down about itself; None if there is nothing of use."""
        try:
            found = json.loads((self.work / _PLAN).read_bytes())
        except (FileNotFoundError, ValueError):
            found = None
        return found if isinstance(found, dict) else None

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write down what is being done. Without an account of it, finished shards mean nothing."""
        if self.read_plan() is None:
            for record in self.work.glob(f"*{_RECORD}"):
                record.unlink()
        self.write(_PLAN, json.dumps(plan).encode(), hidden=True)

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            ConversionFailed: There is none, or it is damaged.
        """
        try:
            return Manifest.read(self.folder)
        except FileNotFoundError as error:
            raise ConversionFailed(
                f"{shown(self.folder)}: expected a finished conversion, found no {MANIFEST_NAME}"
            ) from error
        except ValueError as error:
            raise ConversionFailed(f"{error}. Convert into a new folder") from error

    def finished_records(self) -> dict[str, ShardRecord]:
        """Shards of a finished conversion by its manifest, if there is one."""
        try:
            return Manifest.read(self.folder).shards
        except (FileNotFoundError, ValueError):
            return {}

    def free_bytes(self) -> int:
        """Bytes that can be written where the folder is, or will be."""
        place = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        return shutil.disk_usage(place).free

    def write(self, name: str, data: bytes, *, hidden: bool = False) -> FileRecord:
        """Write a small file whole."""
        partial = self.partial_path()
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.place(partial, name, hidden=hidden)
        return FileRecord(len(data), sha256(data).hexdigest())

    def copy(self, source: Path, name: str) -> FileRecord:
        """Copy a file byte for byte."""
        partial = self.partial_path()
        digest, count = sha256(), 0
        with source.open("rb") as read, partial.open("xb") as written:
            while piece := read.read(COPY_PIECE):
                digest.update(piece)
                written.write(piece)
                count += len(piece)
            written.flush()
            os.fsync(written.fileno())
        self.place(partial, name)
        return FileRecord(count, digest.hexdigest())

    def partial_path(self) -> Path:
        """A name that no other run uses, for a file that is not complete."""
        # Without the file's own name, which may be as long as names can be.
        return self.work / f"{token_hex(8)}.partial"

    def place(self, partial: Path, name: str, *, hidden: bool = False) -> None:
        """Give a complete file its name; survives a crash of the machine."""
        target = (self.work if hidden else self.folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(target)
        sync_folder(target.parent)

    def remember(self, name: str, record: ShardRecord, stamps: dict[str, Stamp]) -> None:
        """Note down a shard before it gets its name."""
        entry = {
            "record": asdict(record),
            "stamps": {file: asdict(stamp) for file, stamp in stamps.items()},
        }
        self.write(_record_name(name), json.dumps(entry).encode(), hidden=True)

    def remembered(self, name: str) -> tuple[ShardRecord, dict[str, Stamp]] | None:
        """What `remember` noted down."""
        try:
            found = json.loads((self.work / _record_name(name)).read_bytes())
            stamps = {file: Stamp(**stamp) for file, stamp in found["stamps"].items()}
            return ShardRecord.from_json(found["record"]), stamps
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def sweep(self) -> None:
        """Remove what is incomplete."""
        if self.work.is_dir():
            for file in self.work.glob("*.partial"):
                file.unlink(missing_ok=True)

    def withdraw_index(self) -> None:
        """A folder without an index is not taken for a checkpoint while it is under repair."""
        (self.folder / INDEX_NAME).unlink(missing_ok=True)
        sync_folder(self.folder)

    def finish(self) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self.work)
        sync_folder(self.folder)


def _record_name(shard: str) -> str:
    return sha256(shard.encode(errors="surrogateescape")).hexdigest()[:32] + _RECORD


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> FileRecord:
    """Size and SHA-256 of a file, read whole."""
    digest, size = sha256(), 0
    buffer = memoryview(bytearray(COPY_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            on_bytes(count)
    return FileRecord(size, digest.hexdigest())
