# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a shard of the result holds, and where: from the source's header, before any byte is read.

Tensors lie in the source's order within their element size, the widest first. So every one begins
at a multiple of its element, which readers rely on, and the format allows no gaps.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from k3_checkpoint.headers import ELEMENT_BYTES, MAX_HEADER, Header
from kimi_k3.convert.options import ConversionFailed, shown
from kimi_k3.convert.source import GROUP, PACKED, SCALE, SHAPE, Module

SHAPE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the result."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    # First byte in the source's shard, of a tensor that stays as it is.
    source: int | None = None


@dataclass(frozen=True)
class Layout:
    """One shard of the result.

    Attributes:
        header: The file's first bytes.
        starts: Tensor -> first byte in the file.
        tensors: In the order of their bytes.
        size: Bytes of the whole file.
    """

    header: bytes
    starts: dict[str, int]
    tensors: tuple[Tensor, ...]
    size: int

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.size - len(self.header)


def plan_shard(name: str, header: Header, modules: Iterable[Module]) -> Layout:
    """Lay out one shard of the result.

    Args:
        name: The shard, for messages.
        header: The source's.
        modules: Those to convert of which the source's shard holds a tensor.

    Raises:
        ConversionFailed: The new header exceeds what the format allows.
    """
    new: dict[str, list[Tensor]] = {}
    for module in modules:
        rows, columns = module.rows, module.columns
        if module.packed_in == name:
            packed, shape = f"{module.name}.{PACKED}", f"{module.name}.{SHAPE}"
            new[packed] = [
                Tensor(packed, "I32", (rows, columns // 8), rows * columns // 2),
                Tensor(shape, "I64", (2,), SHAPE_BYTES),
            ]
        if module.scale_in == name:
            scale = f"{module.name}.{SCALE}"
            groups = columns // GROUP
            new[scale] = [Tensor(scale, "BF16", (rows, groups), 2 * rows * groups)]
    tensors = sorted(_tensors(header, new), key=lambda t: -ELEMENT_BYTES.get(t.dtype, 1))
    entries: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    offset = 0
    offsets = {}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offsets[tensor.name] = offset
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ConversionFailed(
            f"{shown(name)}: its header would have {len(text):,} bytes, and the format allows "
            f"{MAX_HEADER:,}. Split the shard"
        )
    first = 8 + len(text)
    return Layout(
        struct.pack("<Q", len(text)) + text,
        {tensor: first + start for tensor, start in offsets.items()},
        tuple(tensors),
        first + offset,
    )


def _tensors(header: Header, new: dict[str, list[Tensor]]) -> Iterator[Tensor]:
    for name, entry in header.entries.items():
        if name in new:
            yield from new[name]
        else:
            start, stop = header.spans[name]
            yield Tensor(name, entry.dtype, entry.shape, stop - start, start)
