# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a command has found or done, for people and scripts alike."""

from pathlib import Path
from typing import Self

from msgspec import Struct

from kimi_k3.convert.manifest import Manifest


class Result(Struct, frozen=True):
    """A conversion that was made or proven.

    Attributes:
        done: What was done, in words.
        destination: Its folder.
        source: The source's folder by the manifest.
        scale_rule: "mse" or "absmax".
        modules: Modules in int4.
        shards: Shards of the result.
        bytes_in: Bytes of the source's shards.
        bytes_out: Bytes of the result's shards.
        seconds: How long it took.
        converted: Shards that this run converted; None where it was only to prove them.
        verified: Whether this run proved all shards.
    """

    done: str
    destination: str
    source: str
    scale_rule: str
    modules: int
    shards: int
    bytes_in: int
    bytes_out: int
    seconds: float
    converted: int | None
    verified: bool

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        destination: Path,
        seconds: float,
        converted: int | None,
        verified: bool,
    ) -> Self:
        """Add up what a manifest says."""
        records = manifest.shards.values()
        done = f"all {len(records)} shards verified"
        if converted is not None:
            done = f"{converted} of {len(records)} shards converted"
            done += ", the others kept" if converted < len(records) else ""
            done += ", all verified" if verified else ""
        return cls(
            done=done,
            destination=str(destination),
            source=manifest.source,
            scale_rule=manifest.scale_rule,
            modules=len({name for record in records for name in record.modules}),
            shards=len(records),
            bytes_in=sum(record.source.bytes for record in records),
            bytes_out=sum(record.result.bytes for record in records),
            seconds=round(seconds, 3),
            converted=converted,
            verified=verified,
        )


class ShardSize(Struct, frozen=True):
    """Bytes of one shard before and after, and the modules to convert in it."""

    bytes_in: int
    bytes_out: int
    modules: int


class DryRun(Struct, frozen=True):
    """What a conversion would do; sizes are those of all files."""

    source: str
    scale_rule: str
    modules_to_convert: int
    modules_kept: int
    tensors: int
    files_to_copy: int
    bytes_in: int
    bytes_out: int
    memory_per_worker_bytes: int
    shards: dict[str, ShardSize]
    destination: str
    destination_state: str
    bytes_free: int
    workers: int
