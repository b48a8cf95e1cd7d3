# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The folder that a conversion writes into: who may, what is there, and how files get there.

Every file comes to its name by a rename, complete and on disk. What is unfinished, and what a later
run must know of the finished, lies in one hidden folder that the last step removes.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert import lock
from kimi_k3.convert.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Fingerprint,
    Manifest,
    ShardNote,
    checked,
    read_json,
)
from kimi_k3.convert.options import ConversionFailed, resolved, shown
from kimi_k3.convert.source import WORK_NAME

COPY_PIECE = 8 << 20
_PLAN = "plan.json"
_NOTE = ".shard.json"
_LOCK = "lock"
_FOUND = {
    "begun": "an unfinished conversion. Nothing was written. Run again with --resume to continue "
    "it",
    "finished": "a finished conversion. Nothing was written. Run with --verify to prove it, or "
    "with --resume to repair it",
    "foreign": "files that no conversion of this tool wrote. Nothing was written. Name a new or "
    "empty folder",
}


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
        if state == "begun" and not resume and not self._held:
            # Where it may not be written, nobody is told apart from one that was stopped.
            with suppress(OSError):
                held = lock.acquire(self.work / _LOCK, wait=0)
                if held is None:
                    raise self._busy()
                os.close(held)
        if state == "new" or (resume and state in ("begun", "finished")):
            return
        raise ConversionFailed(
            f"{shown(self.folder)}: expected a new or empty folder, found {_FOUND[state]}"
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
        if not any(self.work.glob(f"*{_NOTE}")):
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
        hidden = [f"{WORK_NAME}/{file.name}" for file in self.work.glob(f"*{_NOTE}")]
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

    def begin(self, now: Fingerprint) -> None:
        """Write down what is being done, after comparing it with what an earlier run did.

        Raises:
            ConversionFailed: The folder is that of another conversion; names what differs.
        """
        try:
            earlier = checked(read_json(self.work / _PLAN), Fingerprint)
        except (FileNotFoundError, ValueError):
            earlier = None
        unknown = earlier is None
        if earlier is None and (self.folder / MANIFEST_NAME).exists():
            earlier = self.manifest().fingerprint()
        differ = earlier.differences(now) if earlier is not None else []
        if differ:
            raise ConversionFailed(
                f"{shown(self.folder)} was begun as another conversion:",
                differ,
                "Nothing was written. Resume with the source and the options of then, or name a "
                "new folder.",
            )
        if unknown:
            # Notes of finished shards mean nothing without what was being done.
            for note in self.work.glob(f"*{_NOTE}"):
                note.unlink()
        self.write(_PLAN, json.dumps(now.as_dict()).encode(), hidden=True)

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

    def free_bytes(self) -> int:
        """Bytes that can be written where the folder is, or will be."""
        place = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        return shutil.disk_usage(place).free

    def write(self, name: str, data: bytes, *, hidden: bool = False) -> FileRecord:
        """Write a small file whole."""
        return self._store(BytesIO(data), name, hidden)

    def copy(self, source: Path, name: str) -> FileRecord:
        """Copy a file byte for byte."""
        with source.open("rb") as file:
            return self._store(file, name)

    def _store(self, source: BinaryIO, name: str, hidden: bool = False) -> FileRecord:
        partial = self.partial_path()
        digest, size = sha256(), 0
        target = (self.work if hidden else self.folder) / name
        with _errors_name(target, partial), partial.open("xb") as file:
            while piece := source.read(COPY_PIECE):
                digest.update(piece)
                size += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        self.place(partial, name, hidden=hidden)
        return FileRecord(size, digest.hexdigest())

    def partial_path(self) -> Path:
        """A name that no other run uses, for a file that is not complete."""
        # Without the file's own name, which may be as long as names can be.
        return self.work / f"{token_hex(8)}.partial"

    def place(self, partial: Path, name: str, *, hidden: bool = False) -> None:
        """Give a complete file its name; survives a crash of the machine."""
        target = (self.work if hidden else self.folder) / name
        with _errors_name(target, partial):
            # A link there would lead the file, and what it replaces, out of the folder.
            if target.parent.resolve() != target.parent or target.is_dir():
                self.check_entries([str(target.relative_to(self.folder))])
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(target)
            sync_folder(target.parent)

    def write_note(self, name: str, note: ShardNote) -> None:
        """Note down a shard before it gets its name."""
        self.write(_note_name(name), json.dumps(note.as_dict()).encode(), hidden=True)

    def read_note(self, name: str) -> ShardNote | None:
        """What `write_note` noted down, if anything.

        Raises:
            ValueError: It is damaged.
        """
        try:
            return checked(read_json(self.work / _note_name(name)), ShardNote)
        except FileNotFoundError:
            return None

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


def _note_name(shard: str) -> str:
    return sha256(shard.encode(errors="surrogateescape")).hexdigest()[:32] + _NOTE


@contextmanager
def _errors_name(target: Path, partial: Path) -> Iterator[None]:
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
