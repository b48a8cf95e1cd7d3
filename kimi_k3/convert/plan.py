# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a conversion will do, from headers alone: modules, layouts, bytes. Writes nothing."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.layout import Layout, plan_shard
from kimi_k3.convert.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardRecord,
)
from kimi_k3.convert.options import ConversionFailed, ConvertOptions, shown
from kimi_k3.convert.quantization import converted_config
from kimi_k3.convert.selection import Selection, select
from kimi_k3.convert.shard import Job
from kimi_k3.convert.source import Module, Source, read_source

# Resident memory of one worker at most, measured (docs/convert.md); most of it is torch's code.
WORKER_BYTES = 1 << 30


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

    def fingerprint(self) -> dict[str, Any]:
        """What has to be the same for two runs to be one conversion."""
        return {
            "source": str(self.source.folder),
            "scale_rule": self.options.scale_rule,
            "include": list(self.options.include),
            "exclude": list(self.options.exclude),
            "shards": {name: header.digest for name, header in self.source.headers.items()},
        }

    def job(self, name: str, path: Path, expected: ShardRecord | None = None) -> Job:
        """The work on one shard."""
        return Job(
            source=str(self.source.folder),
            name=name,
            partial=str(path),
            modules=self.modules[name],
            scale_rule=self.options.scale_rule,
            device=self.options.device,
            expected=expected,
        )

    def needed(self, name: str) -> Iterator[str]:
        """Shards of the source that a shard of the result is made of."""
        yield from {name} | {
            shard for m in self.modules[name] for shard in (m.packed_in, m.scale_in)
        }

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

    def as_dict(self) -> dict[str, Any]:
        """Figures for people and scripts."""
        chosen = self.selection
        return {
            "source": str(self.source.folder),
            "scale_rule": self.options.scale_rule,
            "modules_to_convert": len(chosen.modules),
            "modules_kept": len(self.source.modules) - len(chosen.modules),
            "tensors": sum(len(header.entries) for header in self.source.headers.values()),
            "files_to_copy": len(self.source.others),
            "bytes_in": self.source_bytes + self.other_bytes,
            "bytes_out": self.result_bytes + self.other_bytes,
            "memory_per_worker_bytes": WORKER_BYTES,
            "shards": {
                name: {
                    "bytes_in": self.source.headers[name].size,
                    "bytes_out": layout.size,
                    "modules": len(self.modules[name]),
                }
                for name, layout in self.layouts.items()
            },
        }


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


def fingerprint(manifest: Manifest) -> dict[str, Any]:
    """`Plan.fingerprint` of a finished conversion."""
    return {
        "source": manifest.source,
        "scale_rule": manifest.scale_rule,
        "include": list(manifest.include),
        "exclude": list(manifest.exclude),
        "shards": {name: record.source_header for name, record in manifest.shards.items()},
    }


def check_same(folder: Path, earlier: dict[str, Any], plan: Plan) -> None:
    """Refuse to go on with what was begun as something else.

    Raises:
        ConversionFailed: Names what differs.
    """
    differ = []
    for name, now in plan.fingerprint().items():
        then = earlier.get(name)
        if then == now:
            continue
        if isinstance(now, dict) and isinstance(then, dict):
            for shard in sorted(n for n in now.keys() | then.keys() if now.get(n) != then.get(n)):
                one = shard not in now or shard not in then
                what = "only there " + ("then" if shard in then else "now")
                differ.append(f"{shown(shard)}: {what if one else 'another header in the source'}")
        else:
            differ.append(f"{name}: {then!r} then, {now!r} now")
    if differ:
        raise ConversionFailed(
            f"{shown(folder)} was begun as another conversion:",
            differ,
            "Nothing was written. Resume with the source and the options of then, or name a new "
            "folder.",
        )
