# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Safetensors shards and their index, written whole or as headers only.

A shard is written under a temporary name and renamed when it is complete; the index comes last, so
a folder with an index is a finished checkpoint. At most one tensor is held in memory.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3_checkpoint.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """One file: its name and its tensors in the order of their bytes."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the header."""
        return sum(t.nbytes for t in self.tensors)


def split(tensors: Iterable[TensorSpec], count: int) -> list[Shard]:
    """Cut a list of tensors into shards of about equal size, never through an expert.

    Args:
        tensors: in the order of storage.
        count: number of shards.

    Raises:
        ValueError: fewer units than shards.

    """
    units = list(_units(tensors))
    if not 1 <= count <= len(units):
        raise ValueError(f"shards: expected 1 to {len(units)} for this model, found {count}")
    sizes = [sum(t.nbytes for t in unit) for unit in units]
    parts: list[list[TensorSpec]] = []
    part: list[TensorSpec] = []
    remaining, filled = sum(sizes), 0
    for i, (unit, size) in enumerate(zip(units, sizes, strict=True)):
        left = count - len(parts)
        # Close a shard when another unit would take it further from its fair share, or when the
        # units left are only just enough for the shards left.
        fair = remaining / left
        if part and left > 1 and (filled + size / 2 > fair or len(units) - i < left):
            parts.append(part)
            remaining -= filled
            part, filled = [], 0
        part.extend(unit)
        filled += size
    parts.append(part)
    total = len(parts)
    return [
        Shard(f"model-{i:05d}-of-{total:06d}.safetensors", tuple(p))
        for i, p in enumerate(parts, start=1)
    ]


def write_shard(
    folder: Path,
    shard: Shard,
    contents: Callable[[tuple[TensorSpec, ...]], Iterator["torch.Tensor"]] | None,
) -> None:
    """Write one shard.

    Args:
        folder: exists.
        shard: what to write.
        contents: gives the tensors of a shard in order; None writes the header and a hole of the
            right size, which costs no disk space.

    """
    import torch

    target = folder / shard.name
    partial = target.with_suffix(".partial")
    header = _header(shard)
    with partial.open("wb") as file:
        file.write(header)
        if contents is None:
            file.truncate(len(header) + shard.nbytes)
        else:
            for tensor in contents(shard.tensors):
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)
    partial.rename(target)


def write_index(folder: Path, shards: list[Shard]) -> None:
    """Write the index of a complete checkpoint."""
    index = {
        "metadata": {"total_size": sum(s.nbytes for s in shards)},
        "weight_map": {t.name: s.name for s in shards for t in s.tensors},
    }
    partial = folder / f"{INDEX_NAME}.partial"
    partial.write_text(json.dumps(index, indent=1))
    partial.rename(folder / INDEX_NAME)


def _units(tensors: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    unit: list[TensorSpec] = []
    for tensor in tensors:
        if unit and tensor.unit != unit[0].unit:
            yield unit
            unit = []
        unit.append(tensor)
    if unit:
        yield unit


def _header(shard: Shard) -> bytes:
    """Eight bytes of length and a JSON object, padded to a multiple of 8 for aligned data."""
    entries: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard.tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
