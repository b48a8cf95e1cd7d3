# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a conversion will do, from headers alone: modules, layouts, bytes. Writes nothing.

Tensors of a result shard lie in the source's order within their element size, the widest first. So
every one begins at a multiple of its element, which readers rely on, and the format allows no gaps.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from k3_checkpoint.headers import ELEMENT_BYTES, MAX_HEADER, Header
from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.manifest import MANIFEST_NAME, Fingerprint, ShardRecord, Stamp
from kimi_k3.convert.options import ConversionFailed, ConvertOptions, shown
from kimi_k3.convert.quantization import converted_config
from kimi_k3.convert.selection import Selection, select
from kimi_k3.convert.source import PACKED, SCALE, SHAPE, Module, Source, read_source
from mxfp4_int4 import GROUP_SIZE

_SHAPE_BYTES = 16


class Job(Struct, frozen=True):
    """One shard to convert.

    Attributes:
        source: The source's folder.
        name: The shard's file name.
        result: The file to write; with ``expected``, the one to read and compare.
        modules: To convert, each with a tensor in this shard.
        scale_rule: Of the conversion.
        device: "cpu" or "cuda".
        expected: When it is to be proven: what the manifest says.
    """

    source: Path
    name: str
    result: Path
    modules: tuple[Module, ...]
    scale_rule: str
    device: str
    expected: ShardRecord | None = None


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


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        source: Read and judged.
        options: As given.
        selection: The modules to convert.
        layouts: Shard -> what its result will hold.
        modules: Shard -> modules to convert that have a tensor in it.
    """

    source: Source
    options: ConvertOptions
    selection: Selection
    layouts: dict[str, Layout]
    modules: dict[str, tuple[Module, ...]]

    @property
    def source_bytes(self) -> int:
        """Bytes of all shards of the source."""
        return sum(header.size for header in self.source.headers.values())

    @property
    def result_bytes(self) -> int:
        """Bytes of all shards of the result."""
        return sum(layout.size for layout in self.layouts.values())

    @property
    def result_names(self) -> tuple[str, ...]:
        """Every file of the result, relative to its folder."""
        others = (*self.source.others, "config.json", MANIFEST_NAME, INDEX_NAME)
        return (*self.layouts, *others)

    @property
    def other_bytes(self) -> int:
        """Bytes of the files that are copied."""
        return sum((self.source.folder / name).stat().st_size for name in self.source.others)

    def fingerprint(self) -> Fingerprint:
        """What has to be the same for two runs to be one conversion."""
        chosen = self.options
        globs = list(chosen.include), list(chosen.exclude)
        headers = {name: header.digest for name, header in self.source.headers.items()}
        return Fingerprint(str(self.source.folder), chosen.scale_rule, *globs, headers)

    def job(self, name: str, path: Path, expected: ShardRecord | None = None) -> Job:
        """The work on one shard of the result, which lies at ``path`` or is to be written there."""
        return Job(
            source=self.source.folder,
            name=name,
            result=path,
            modules=self.modules[name],
            scale_rule=self.options.scale_rule,
            device=self.options.device,
            expected=expected,
        )

    def needed(self, name: str) -> list[str]:
        """Shards of the source that a shard of the result is made of."""
        modules = self.modules[name]
        return sorted({name, *(m.packed_in for m in modules), *(m.scale_in for m in modules)})

    def stamps(self, name: str) -> dict[str, Stamp]:
        """Stamps of these shards as they are now."""
        return {file: Stamp.of(self.source.folder / file) for file in self.needed(name)}

    def config_text(self) -> bytes:
        """config.json of the result."""
        chosen = self.selection
        config = converted_config(self.source.config, chosen.converted, chosen.kept)
        return (json.dumps(config, indent=2) + "\n").encode()

    def index_text(self) -> bytes:
        """The index of the result."""
        total = {"total_size": sum(layout.data_bytes for layout in self.layouts.values())}
        index = {
            "metadata": self.source.index_metadata | total,
            "weight_map": {
                tensor.name: name
                for name, layout in self.layouts.items()
                for tensor in layout.tensors
            },
        }
        return (json.dumps(index, indent=1) + "\n").encode()


def make_plan(folder: Path, options: ConvertOptions, destination: Path | None = None) -> Plan:
    """Read a source and decide what is to be done.

    Args:
        folder: The source.
        options: What to convert, and how.
        destination: Resolved; see `read_source`.

    Raises:
        ConversionFailed: With every problem found.
    """
    source = read_source(folder, destination)
    selection = select(source.modules, options.include, options.exclude)
    modules: dict[str, list[Module]] = {name: [] for name in source.headers}
    for module in selection.modules.values():
        for name in {module.packed_in, module.scale_in}:
            modules[name].append(module)
    layouts = {
        name: plan_shard(name, header, modules[name]) for name, header in source.headers.items()
    }
    return Plan(
        source, options, selection, layouts, {name: tuple(m) for name, m in modules.items()}
    )


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
                Tensor(shape, "I64", (2,), _SHAPE_BYTES),
            ]
        if module.scale_in == name:
            scale = f"{module.name}.{SCALE}"
            groups = columns // GROUP_SIZE
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
