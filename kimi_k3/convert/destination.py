# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The folder that a conversion writes into: who may, what is there, and how files get there.

Every file comes to its name by a rename, complete and on disk. What is unfinished, and what a later
run must know of the finished, lies in one hidden folder that the last step removes.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert import lock
from kimi_k3.convert.fields import objects, read_json, text, texts, whole
from kimi_k3.convert.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    ShardRecord,
)
from kimi_k3.convert.options import ConversionFailed, resolved, shown
from kimi_k3.convert.source import WORK_NAME

COPY_PIECE = 8 << 20
_PLAN = "plan.json"
_RECORD = ".shard.json"
_LOCK = "lock"
# What an account must say; `Plan.fingerprint` says it.
_ACCOUNT = ("source", "scale_rule", "include", "exclude", "shards")


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

    @classmethod
    def from_json(cls, value: object, at: str) -> "Stamp":
        """The inverse of `dataclasses.asdict`.

        Raises:
            ValueError: A field is not of its kind.
        """
        found = objects(value, at, ("bytes", "mtime_ns"))
        # There are files from before 1970.
        if type(found["mtime_ns"]) is not int:
            raise ValueError(f"{at}.mtime_ns: expected a whole number")
        return cls(whole(found["bytes"], f"{at}.bytes"), found["mtime_ns"])


class Destination:
    """A folder under conversion."""

    def __init__(self, folder: Path) -> None:
        self.folder = resolved(folder)
        self.work = self.folder / WORK_NAME
        self._held = False

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
        if self.work.exists() and not self.work.is_dir():
            raise ConversionFailed(
                f"{shown(self.work)}: expected a folder, found a file. Remove it, or name another "
                "destination"
            )
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
        if state == "begun" and not resume and not self._held and lock.is_held(self.work / _LOCK):
            raise self._busy()
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
            held = lock.acquire(self.work / _LOCK)
        except OSError as error:
            raise ConversionFailed(
                f"{shown(error.filename or self.folder)}: cannot be written: {error.strerror}. "
                "Nothing was written"
            ) from error
        if held is None:
            raise self._busy()
        self._held = True
        try:
            yield held
        finally:
            self._held = False
            # What cannot be tidied up must not hide why the run ended.
            with suppress(OSError):
                self._leave(made)
            os.close(held)

    def _busy(self) -> ConversionFailed:
        return ConversionFailed(
            f"{shown(self.folder)}: another process is converting into this folder. Nothing was "
            "written. Wait for it, or name another folder"
        )

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

    def check_entries(self, names: Iterable[str]) -> None:
        """Refuse what stands where files are to be written and is no file of ours to replace.

        Raises:
            ConversionFailed: A folder, a pipe or a device under a file's name, or a link in place
                of a folder, through which something else would be overwritten.
        """
        hidden = [f"{WORK_NAME}/{file.name}" for file in self.work.glob(f"*{_RECORD}")]
        problems: dict[str, None] = {}
        for name in (*names, f"{WORK_NAME}/{_PLAN}", *hidden):
            path = self.folder / name
            above = [p for p in reversed(path.parents) if self.folder in p.parents]
            wrong = [p for p in above if p.is_symlink() or (p.exists() and not p.is_dir())]
            if wrong:
                problems[f"{shown(wrong[0].relative_to(self.folder))}: no folder, or a link"] = None
            elif path.exists() and not path.is_file():
                kind = "a folder" if path.is_dir() else "no regular file"
                problems[f"{shown(name)}: expected a file or nothing, found {kind}"] = None
        if problems:
            raise ConversionFailed(
                f"{shown(self.folder)}: not all files can get their names there:",
                list(problems),
                "Nothing was written. Remove what is named, or name a new folder.",
            )

    def read_plan(self) -> dict[str, Any] | None:
        """What an earlier run has written down about itself; None if there is nothing of use."""
        try:
            found = objects(read_json(self.work / _PLAN), _PLAN, _ACCOUNT)
            for name in ("source", "scale_rule"):
                text(found[name], name)
            for name in ("include", "exclude"):
                texts(found[name], name)
            for name, header in objects(found["shards"], "shards").items():
                text(header, name)
        except (FileNotFoundError, ValueError):
            return None
        return found

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
        with _told_as(self._path(name, hidden), partial), partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.place(partial, name, hidden=hidden)
        return FileRecord(len(data), sha256(data).hexdigest())

    def copy(self, source: Path, name: str) -> FileRecord:
        """Copy a file byte for byte."""
        partial = self.partial_path()
        digest, count = sha256(), 0
        told = _told_as(self._path(name), partial)
        with told, source.open("rb") as read, partial.open("xb") as written:
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
        target = self._path(name, hidden)
        with _told_as(target, partial):
            # A link there would lead the file, and what it replaces, out of the folder.
            if target.parent.resolve() != target.parent or target.is_dir():
                self.check_entries([str(target.relative_to(self.folder))])
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(target)
            sync_folder(target.parent)

    def _path(self, name: str, hidden: bool = False) -> Path:
        return (self.work if hidden else self.folder) / name

    def remember(self, name: str, record: ShardRecord, stamps: dict[str, Stamp]) -> None:
        """Note down a shard before it gets its name."""
        entry = {
            "record": asdict(record),
            "stamps": {file: asdict(stamp) for file, stamp in stamps.items()},
        }
        self.write(_record_name(name), json.dumps(entry).encode(), hidden=True)

    def remembered(self, name: str) -> tuple[ShardRecord, dict[str, Stamp]] | None:
        """What `remember` noted down; None if there is nothing of use."""
        try:
            note = objects(read_json(self.work / _record_name(name)), name, ("record", "stamps"))
            stamps = {
                file: Stamp.from_json(stamp, file)
                for file, stamp in objects(note["stamps"], "stamps").items()
            }
            return ShardRecord.from_json(note["record"]), stamps
        except (FileNotFoundError, ValueError):
            return None

    def is_noted(self, name: str) -> bool:
        """Whether `remember` has noted down a shard, legible or not."""
        return (self.work / _record_name(name)).exists()

    def sweep(self) -> None:
        """Remove what is incomplete."""
        if self.work.is_dir():
            for file in self.work.glob("*.partial"):
                if file.is_dir() and not file.is_symlink():
                    shutil.rmtree(file)
                else:
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


@contextmanager
def _told_as(target: Path, partial: Path) -> Iterator[None]:
    """Errors about an incomplete file name the one that it was to become."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(partial):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error


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
