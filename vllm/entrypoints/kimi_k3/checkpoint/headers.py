# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads what safetensors shards say about themselves, and checks it against their size.

Only headers are read: a shard of 16 GB costs as much as one of 16 KB. No tensor byte is touched.
"""

import json
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

# The safetensors format: bytes of an element.
ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
# The limit of the safetensors format.
MAX_HEADER = 100_000_000


class HeaderError(ValueError):
    """A file is no complete safetensors shard; the message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a header says about one tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, Entry]:
    """Tensors of one shard.

    Raises:
        HeaderError: the file is truncated, too long, or no safetensors file.

    """
    size = file.stat().st_size
    with file.open("rb") as shard:
        prefix = shard.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER + 1
        if length > MAX_HEADER or length > size - 8:
            raise HeaderError(
                f"{size:,} bytes do not hold a safetensors header: truncated, or of another format"
            )
        text = shard.read(length)
    try:
        pairs = json.loads(text, object_pairs_hook=unique_pairs)
        pairs.pop("__metadata__", None)
        entries = {name: Entry(e["dtype"], tuple(e["shape"])) for name, e in pairs.items()}
        spans = sorted(tuple(e["data_offsets"]) for e in pairs.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeaderError(f"its header is no safetensors header: {error}") from error
    end = 0
    for start, stop in spans:
        if start != end:
            raise HeaderError(f"its tensors leave a gap or overlap at byte {end:,} of the data")
        end = stop
    for name, entry in entries.items():
        bits = ELEMENT_BYTES.get(entry.dtype)
        start, stop = pairs[name]["data_offsets"]
        if bits is not None and stop - start != prod(entry.shape) * bits:
            raise HeaderError(f"{name}: {stop - start:,} bytes are not {entry.dtype} {entry.shape}")
    needed = 8 + length + end
    if size != needed:
        state = "truncated" if size < needed else "followed by foreign bytes"
        raise HeaderError(f"expected {needed:,} bytes by its header, found {size:,}: {state}")
    return entries


def unique_pairs(pairs: list[tuple[str, object]]) -> dict:
    """JSON object hook that refuses what `json` would silently resolve to the last one.

    Raises:
        ValueError: a name is given twice.

    """
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"named twice: {', '.join(twice[:5])}")
    return result
