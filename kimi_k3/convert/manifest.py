# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The records of a conversion: the manifest that stays in its folder, and the notes that a resumed
run reads. All are JSON that somebody may have edited, so each value is checked when it is read.

The manifest holds no time, no host and nothing else that differs between two runs over one source.
"""

import json
import os
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path, PurePosixPath
from reprlib import repr as short
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta, Struct

from k3_checkpoint.headers import unique_pairs
from kimi_k3.convert.options import SCALE_RULES, shown

MANIFEST_NAME = "kimi_k3_conversion.json"
VERSION = 1
_PIECE = 8 << 20
_T = TypeVar("_T")

Size = Annotated[int, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what is stored as a JSON object of exactly these fields."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class FileRecord(Record, frozen=True):
    """A file's size in bytes and its SHA-256."""

    bytes: Size
    sha256: Sha256

    @classmethod
    def of(cls, path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> Self:
        """The record of a file, which is read whole.

        Args:
            path: The file.
            on_bytes: Told of bytes as they are read, which `hashlib.file_digest` cannot do.
        """
        digest, size = sha256(), 0
        buffer = memoryview(bytearray(_PIECE))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
                on_bytes(count)
        return cls(size, digest.hexdigest())


class ShardRecord(Record, frozen=True):
    """One shard.

    Attributes:
        source: The shard that was read.
        source_header: SHA-256 of its header alone.
        result: The shard that was written.
        modules: The modules of which this shard holds converted tensors.
    """

    source: FileRecord
    source_header: Sha256
    result: FileRecord
    modules: tuple[str, ...]


class Stamp(Record, frozen=True):
    """By what a change of a source file is noticed without reading it."""

    bytes: Size
    mtime_ns: int

    @classmethod
    def of(cls, file: Path) -> Self:
        """The stamp of a file, links followed."""
        status = file.stat()
        return cls(status.st_size, status.st_mtime_ns)


class ShardNote(Record, frozen=True):
    """What an unfinished conversion notes down of a finished shard, and of the source files that it
    was made of."""

    record: ShardRecord
    stamps: dict[str, Stamp]


class Fingerprint(Record, frozen=True):
    """What has to be the same for two runs to be one conversion; ``shards`` are header digests."""

    source: str
    scale_rule: str
    include: list[str]
    exclude: list[str]
    shards: dict[str, str]

    def differences(self, now: "Fingerprint") -> list[str]:
        """What another run does differently, a line each."""
        differ = []
        for name in ("source", "scale_rule", "include", "exclude"):
            then, value = getattr(self, name), getattr(now, name)
            if then != value:
                differ.append(f"{name}: {then!r} then, {value!r} now")
        for shard in sorted(dict(self.shards.items() ^ now.shards.items())):
            if shard in self.shards and shard in now.shards:
                differ.append(f"{shown(shard)}: another header in the source")
            else:
                when = "then" if shard in self.shards else "now"
                differ.append(f"{shown(shard)}: only there {when}")
        return differ


class Manifest(Record, frozen=True, kw_only=True):
    """What a finished conversion says about itself.

    Attributes:
        version: Of this format.
        source: Folder of the source, absolute.
        scale_rule: "mse" or "absmax".
        include: Globs that chose the modules; empty for all.
        exclude: Globs that kept modules as they were.
        shards: Name -> record.
        files: Every other file of the result but the index and this one.
        tools: Package -> version.
    """

    version: int = VERSION
    source: str
    scale_rule: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    shards: dict[str, ShardRecord]
    files: dict[str, FileRecord]
    tools: dict[str, str]

    def text(self) -> str:
        """The file's contents."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def fingerprint(self) -> Fingerprint:
        """Of the run that wrote it."""
        headers = {name: record.source_header for name, record in self.shards.items()}
        globs = list(self.include), list(self.exclude)
        return Fingerprint(self.source, self.scale_rule, *globs, headers)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a converted checkpoint.

        Raises:
            OSError: It cannot be read.
            ValueError: It is none, or of another version; the message names the file and the field.
        """
        file = folder / MANIFEST_NAME
        try:
            return cls._from_json(read_json(file))
        except ValueError as error:
            raise ValueError(f"{shown(file)}: not a conversion's manifest: {error}") from error

    @classmethod
    def _from_json(cls, value: object) -> Self:
        # Before the fields, which another version may have others of.
        version = value.get("version") if isinstance(value, dict) else VERSION
        if type(version) is not int or version != VERSION:
            raise ValueError(f"version: expected {VERSION}, found {short(version)}")
        found = checked(value, dict[str, Any])
        # One by one, because msgspec does not say in which entry of a dictionary a fault is.
        for field, kind in (("shards", ShardRecord), ("files", FileRecord), ("tools", str)):
            for name, entry in checked(found.get(field, {}), dict[str, Any], field).items():
                if field != "tools":
                    _check_name(name, field)
                checked(entry, kind, f"{field}.{shown(name)}")
        manifest = checked(found, cls)
        rule, source = manifest.scale_rule, manifest.source
        if rule not in SCALE_RULES:
            expected = ", ".join(SCALE_RULES)
            raise ValueError(f"scale_rule: expected one of {expected}, found {short(rule)}")
        if not Path(source).is_absolute() or "\0" in source:
            raise ValueError(f"source: expected an absolute path, found {short(source)}")
        return manifest


def checked(value: object, kind: type[_T], at: str = "") -> _T:
    """Parsed JSON as a typed value.

    Raises:
        ValueError: A field is missing, unknown or of another type; the message begins with its
            name, after ``at``.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        where = (at + path.removesuffix("`")).removeprefix(".") or "the whole"
        what = what[0].lower() + what[1:].replace(", got ", ", found ")
        raise ValueError(f"{where}: {what}") from error


def read_regular(file: Path) -> bytes:
    """A file's contents, links followed; a pipe or a device is not even opened.

    Raises:
        OSError: It cannot be read.
        ValueError: It is there, and no regular file.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("expected a regular file, found a folder, a pipe or a device")
    # One that has become a pipe since: nobody waits for its other end.
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as opened:
        return opened.read()


def read_json(file: Path) -> Any:
    """A small JSON file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON, or no regular file.
    """
    text = read_regular(file)
    try:
        return json.loads(text.decode(), object_pairs_hook=unique_pairs)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _check_name(name: str, field: str) -> None:
    """Refuse a name that leads out of the folder, or nowhere."""
    path = PurePosixPath(name)
    if "\0" in name or str(path) != name or name == "." or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{field}: expected a name of a file in the folder, found {short(name)}")
    if field == "shards" and (path.name != name or path.suffix != ".safetensors"):
        raise ValueError(f"shards: expected names of *.safetensors files, found {short(name)}")
