# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The record that stays in a converted checkpoint: what it was made of, and what it must hold.

It holds no time, no host and nothing else that differs between two runs over one source.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from reprlib import repr as short
from typing import Self

from kimi_k3.convert.fields import (
    checksum,
    inside,
    objects,
    read_json,
    text,
    texts,
    whole,
)
from kimi_k3.convert.options import SCALE_RULES, shown

MANIFEST_NAME = "kimi_k3_conversion.json"
VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its SHA-256."""

    bytes: int
    sha256: str

    @classmethod
    def from_json(cls, value: object, at: str = "file") -> Self:
        """The inverse of `dataclasses.asdict`.

        Raises:
            ValueError: A field is not of its kind; the message begins with ``at``.
        """
        found = objects(value, at, _names(cls))
        return cls(whole(found["bytes"], f"{at}.bytes"), checksum(found["sha256"], f"{at}.sha256"))


@dataclass(frozen=True)
class ShardRecord:
    """One shard.

    Attributes:
        source: The shard that was read.
        source_header: SHA-256 of its header alone.
        result: The shard that was written.
        modules: The modules of which this shard holds converted tensors.
    """

    source: FileRecord
    source_header: str
    result: FileRecord
    modules: tuple[str, ...]

    @classmethod
    def from_json(cls, value: object, at: str = "shard") -> Self:
        """The inverse of `dataclasses.asdict`.

        Raises:
            ValueError: See `FileRecord.from_json`.
        """
        found = objects(value, at, _names(cls))
        return cls(
            FileRecord.from_json(found["source"], f"{at}.source"),
            checksum(found["source_header"], f"{at}.source_header"),
            FileRecord.from_json(found["result"], f"{at}.result"),
            texts(found["modules"], f"{at}.modules"),
        )


@dataclass(frozen=True)
class Manifest:
    """What a finished conversion says about itself.

    Attributes:
        source: Folder of the source, absolute.
        scale_rule: "mse" or "absmax".
        include: Globs that chose the modules; empty for all.
        exclude: Globs that kept modules as they were.
        shards: Name -> record.
        files: Every other file of the result but the index and this one.
        tools: Package -> version.
    """

    source: str
    scale_rule: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    shards: dict[str, ShardRecord]
    files: dict[str, FileRecord]
    tools: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The file's contents."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a converted checkpoint.

        Raises:
            OSError: It cannot be read.
            ValueError: It is none, or of another version.
        """
        file = folder / MANIFEST_NAME
        try:
            return cls.from_json(read_json(file))
        except ValueError as error:
            raise ValueError(f"{shown(file)}: not a conversion's manifest: {error}") from error

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The inverse of `text`, parsed.

        Raises:
            ValueError: Names the field that is not of its kind.
        """
        found = objects(value, "the whole")
        # Before the fields, which another version may have others of.
        version = found.get("version")
        if type(version) is not int or version != VERSION:
            raise ValueError(f"version: expected {VERSION}, found {short(version)}")
        objects(found, "the whole", ("version", *_names(cls)))
        rule = text(found["scale_rule"], "scale_rule")
        if rule not in SCALE_RULES:
            expected = ", ".join(SCALE_RULES)
            raise ValueError(f"scale_rule: expected one of {expected}, found {short(rule)}")
        source = text(found["source"], "source")
        if not Path(source).is_absolute() or "\0" in source:
            raise ValueError(f"source: expected an absolute path, found {short(source)}")
        shards, files = (objects(found[name], name) for name in ("shards", "files"))
        tools = objects(found["tools"], "tools")
        return cls(
            source=source,
            scale_rule=rule,
            include=texts(found["include"], "include"),
            exclude=texts(found["exclude"], "exclude"),
            shards={
                _shard_name(name): ShardRecord.from_json(record, f"shards.{shown(name)}")
                for name, record in shards.items()
            },
            files={
                inside(name, "files"): FileRecord.from_json(record, f"files.{shown(name)}")
                for name, record in files.items()
            },
            tools={name: text(tool, f"tools.{shown(name)}") for name, tool in tools.items()},
        )


def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def _shard_name(name: str) -> str:
    if inside(name, "shards") != Path(name).name or not name.endswith(".safetensors"):
        raise ValueError(f"shards: expected names of *.safetensors files, found {short(name)}")
    return name
