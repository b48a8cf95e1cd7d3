# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The record that stays in a converted checkpoint: what it was made of, and what it must hold.

It holds no time, no host and nothing else that differs between two runs over one source.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

MANIFEST_NAME = "kimi_k3_conversion.json"
VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its SHA-256."""

    bytes: int
    sha256: str


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
    def from_json(cls, found: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""
        return cls(
            FileRecord(**found["source"]),
            found["source_header"],
            FileRecord(**found["result"]),
            tuple(found["modules"]),
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
            found = json.loads(file.read_bytes())
            if found["version"] != VERSION:
                raise ValueError(f"expected version {VERSION}, found {found['version']!r}")
            return cls(
                source=found["source"],
                scale_rule=found["scale_rule"],
                include=tuple(found["include"]),
                exclude=tuple(found["exclude"]),
                shards={n: ShardRecord.from_json(r) for n, r in found["shards"].items()},
                files={n: FileRecord(**r) for n, r in found["files"].items()},
                tools=found["tools"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not a conversion's manifest: {error!r}") from error
