# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads what safetensors shards say about themselves, and checks it against their size.

Only headers are read: a shard of 16 GB costs as much as one of 16 KB. No tensor byte is touched.
"""

import json
import struct
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Header:
    """One shard's header.

    Attributes:
        entries: Tensor -> dtype and shape, in the order of their bytes.
        spans: Tensor -> first byte and the byte after the last one, counted from the file's start.
        metadata: The free text that a writer left, often ``{"format": "pt"}``.
        size: Bytes of the whole file.
        digest: SHA-256 of the header as it stands in the file.
    """

    entries: dict[str, Entry]
    spans: dict[str, tuple[int, int]]
    metadata: dict[str, str]
    size: int
    digest: str


def read_header(file: Path) -> dict[str, Entry]:
    """Tensors of one shard.

    Raises:
        HeaderError: the file is truncated, too long, or no safetensors file.

    """
    return read_full_header(file).entries


def read_full_header(file: Path) -> Header:
    """Everything that one shard says about itself.

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
        # Decoded here, because `json` would take UTF-16 and lone surrogates as well.
        pairs = json.loads(text.decode(), object_pairs_hook=unique_pairs)
        if not isinstance(pairs, dict):
            raise ValueError(f"expected an object, found {type(pairs).__name__}")
        metadata = pairs.pop("__metadata__", None) or {}
        _check_kinds(metadata, pairs)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header is no safetensors header: {error}") from error
    pairs = dict(sorted(pairs.items(), key=lambda pair: tuple(pair[1]["data_offsets"])))
    entries = {name: Entry(e["dtype"], tuple(e["shape"])) for name, e in pairs.items()}
    spans = {name: tuple(e["data_offsets"]) for name, e in pairs.items()}
    end = 0
    for name, (start, stop) in spans.items():
        if start != end or stop < start:
            raise HeaderError(
                f"its tensors leave a gap or overlap at byte {end:,} of the data: {_shown(name)} "
                f"takes {start:,} to {stop:,}"
            )
        end = stop
    for name, entry in entries.items():
        bits = ELEMENT_BYTES.get(entry.dtype)
        start, stop = spans[name]
        if bits is not None and stop - start != prod(entry.shape) * bits:
            raise HeaderError(
                f"{_shown(name)}: {stop - start:,} bytes are not {entry.dtype} {entry.shape}"
            )
    first = 8 + length
    if size != first + end:
        state = "truncated" if size < first + end else "followed by foreign bytes"
        raise HeaderError(f"expected {first + end:,} bytes by its header, found {size:,}: {state}")
    return Header(
        entries,
        {name: (first + start, first + stop) for name, (start, stop) in spans.items()},
        metadata,
        size,
        sha256(prefix + text).hexdigest(),
    )


def _check_kinds(metadata: object, pairs: dict[str, Any]) -> None:
    """Refuse JSON of the wrong kinds, which would otherwise compare and add up somehow.

    Raises:
        ValueError: names the first one.

    """
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__: expected text by name")
    for name, entry in pairs.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{_shown(name)}: expected an object, found {short(entry)}")
        dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(span, list)):
            raise ValueError(f"{_shown(name)}: expected a dtype, a shape and data_offsets")
        if len(span) != 2:
            raise ValueError(f"{_shown(name)}: expected two data_offsets, found {short(span)}")
        # `type`, because JSON's true is an int to Python.
        if not all(type(number) is int and number >= 0 for number in (*shape, *span)):
            raise ValueError(
                f"{_shown(name)}: expected whole numbers of 0 or more as shape and data_offsets"
            )
        if not name.isascii():
            _check_name(name)


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{_shown(name)}: a name that is no Unicode text") from error


def _shown(name: str) -> str:
    return name if name and name.isprintable() else repr(name)


def unique_pairs(pairs: list[tuple[str, object]]) -> dict:
    """JSON object hook that refuses what `json` would silently resolve to the last one.

    Raises:
        ValueError: a name is given twice.

    """
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"named twice: {', '.join(map(_shown, twice[:5]))}")
    return result
