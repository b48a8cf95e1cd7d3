# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads what safetensors shards say about themselves, and checks it against their size.

Only headers are read: a shard of 16 GB costs as much as one of 16 KB. No tensor byte is touched.
"""

import json
import re
import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any

import msgspec

from k3_checkpoint.problems import shown

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

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Header:
    """One shard's header.

    Attributes:
        entries: Tensor -> dtype and shape, in the order of their bytes.
        stops: For each of them, the byte after its last one, counted from the file's start.
        first: Where the first tensor starts; each other one starts where the one before it stops.
        metadata: The free text that a writer left, often ``{"format": "pt"}``.
        size: Bytes of the whole file.
        digest: SHA-256 of the header as it stands in the file.
    """

    entries: dict[str, Entry]
    stops: "array[int]"
    first: int
    metadata: dict[str, str]
    size: int
    digest: str

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Tensor -> first byte and the byte after the last one, from the file's start."""
        starts = (self.first, *self.stops)
        return dict(zip(self.entries, zip(starts, self.stops, strict=False), strict=True))


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Stored(msgspec.Struct, gc=False):
    """A tensor as it stands in a header."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


_TENSORS = msgspec.json.Decoder(dict[str, _Stored])
_STRINGS = msgspec.json.Decoder(dict[str, str])
# Where every writer puts it: first.
_METADATA = re.compile(rb'\{ *"__metadata__" *: *(\{[^{}]*\}) *(?:,(?= *")|(?=\}))')


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
        metadata, tensors = _decode(text)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header is no safetensors header: {error}") from error
    entries, stops = _laid_out(tensors)
    first = 8 + length
    end = first + (stops[-1] if stops else 0)
    if size != end:
        state = "truncated" if size < end else "followed by foreign bytes"
        raise HeaderError(f"expected {end:,} bytes by its header, found {size:,}: {state}")
    digest = sha256(prefix + text).hexdigest()
    return Header(
        entries, array("Q", [first + stop for stop in stops]), first, metadata, size, digest
    )


def _decode(text: bytes) -> tuple[dict[str, str], dict[str, _Stored]]:
    """Metadata and tensors of a header.

    Raises:
        ValueError: the text is no header; names the first fault.

    """
    # msgspec is many times as fast as `json`, and silently keeps the last of two equal names. So
    # all strings of the text are counted; where one is unaccounted for, `json` reads it again.
    found = _METADATA.match(text)
    try:
        metadata = _STRINGS.decode(found[1]) if found else {}
        tensors = _TENSORS.decode(b"{" + text[found.end() :] if found else text)
    except (msgspec.DecodeError, RecursionError):
        return _decode_strictly(text)
    strings = (1 + 2 * len(metadata) if found else 0) + 5 * len(tensors)
    if has_strings(text, strings) and "__metadata__" not in tensors:
        return metadata, tensors
    return _decode_strictly(text)


def _decode_strictly(text: bytes) -> tuple[dict[str, str], dict[str, _Stored]]:
    # Decoded here, because `json` would take UTF-16 and lone surrogates as well.
    pairs = json.loads(text.decode(), object_pairs_hook=unique_pairs)
    if not isinstance(pairs, dict):
        raise ValueError(f"expected an object, found {type(pairs).__name__}")
    metadata = pairs.pop("__metadata__", None) or {}
    _check_kinds(metadata, pairs)
    return metadata, msgspec.convert(pairs, dict[str, _Stored])


def has_strings(text: bytes, count: int) -> bool:
    """Whether a JSON text holds so many strings, keys included, and none with an escape."""
    return text.count(b'"') == 2 * count and b"\\" not in text


def _laid_out(tensors: dict[str, _Stored]) -> tuple[dict[str, Entry], list[int]]:
    """Tensors in the order of their bytes, and where each stops.

    Raises:
        HeaderError: they leave a gap, overlap, or take other sizes than their shapes need.

    """
    # Kimi-K3 has half a million tensors of two dozen kinds: each kind is one object.
    kinds: dict[tuple[str, tuple[int, ...]], tuple[Entry, int | None]] = {}
    entries: dict[str, Entry] = {}
    stops: list[int] = []
    end = 0
    for name, stored in sorted(tensors.items(), key=lambda pair: pair[1].data_offsets):
        start, stop = stored.data_offsets
        if start != end or stop < start:
            raise HeaderError(
                f"its tensors leave a gap or overlap at byte {end:,} of the data: {shown(name)} "
                f"takes {start:,} to {stop:,}"
            )
        kind = stored.dtype, stored.shape
        if kind not in kinds:
            width = ELEMENT_BYTES.get(stored.dtype)
            kinds[kind] = Entry(*kind), width and prod(stored.shape) * width
        entries[name], size = kinds[kind]
        if size is not None and stop - start != size:
            raise HeaderError(
                f"{shown(name)}: {stop - start:,} bytes are not {stored.dtype} {stored.shape}"
            )
        stops.append(stop)
        end = stop
    return entries, stops


def _check_kinds(metadata: object, pairs: dict[str, Any]) -> None:
    """Refuse JSON of the wrong kinds, which would otherwise compare and add up somehow.

    Raises:
        ValueError: names the first one.

    """
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__: expected text by name")
    for name, entry in pairs.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{shown(name)}: expected an object, found {short(entry)}")
        dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(span, list)):
            raise ValueError(f"{shown(name)}: expected a dtype, a shape and data_offsets")
        if len(span) != 2:
            raise ValueError(f"{shown(name)}: expected two data_offsets, found {short(span)}")
        # `type`, because JSON's true is an int to Python.
        if not all(type(number) is int and number >= 0 for number in (*shape, *span)):
            raise ValueError(
                f"{shown(name)}: expected whole numbers of 0 or more as shape and data_offsets"
            )
        if not name.isascii():
            _check_name(name)


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{shown(name)}: a name that is no Unicode text") from error


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object hook that refuses what `json` would silently resolve to the last one.

    Raises:
        ValueError: a name is given twice.

    """
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"named twice: {', '.join(map(shown, twice[:5]))}")
    return result
