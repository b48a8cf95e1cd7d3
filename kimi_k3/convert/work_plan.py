# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a conversion will do, from headers alone: modules, layouts, bytes. Writes nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.manifest import MANIFEST_NAME, Fingerprint, ShardRecord, Stamp
from kimi_k3.convert.options import ConvertOptions
from kimi_k3.convert.quantization import converted_config
from kimi_k3.convert.selection import Selection, select
from kimi_k3.convert.shard import Job
from kimi_k3.convert.shard_layout import Layout, plan_shard
from kimi_k3.convert.source import Module, Source, read_source


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
