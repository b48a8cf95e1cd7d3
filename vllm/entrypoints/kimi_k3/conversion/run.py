# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`convert_checkpoint`: everything is judged before a byte is written, and the index comes last."""

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.entrypoints.kimi_k3.checkpoint.shards import INDEX_NAME
from vllm.entrypoints.kimi_k3.conversion.destination import Destination, Stamp, digest_file
from vllm.entrypoints.kimi_k3.conversion.layout import Layout, plan_shard
from vllm.entrypoints.kimi_k3.conversion.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    ShardRecord,
)
from vllm.entrypoints.kimi_k3.conversion.options import ConversionFailed, ConvertOptions
from vllm.entrypoints.kimi_k3.conversion.quantization import converted_config
from vllm.entrypoints.kimi_k3.conversion.selection import Selection, select
from vllm.entrypoints.kimi_k3.conversion.shard import Job, convert_shard
from vllm.entrypoints.kimi_k3.conversion.source import Module, Source, read_source

_TOOLS = ("vllm-kimi-k3", "torch")


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        source: Read and judged.
        selection: The modules to convert.
        layouts: Shard -> what its result will hold.
        modules: Shard -> modules to convert that have a tensor in it.
    """

    source: Source
    selection: Selection
    layouts: dict[str, Layout]
    modules: dict[str, tuple[Module, ...]]

    def fingerprint(self, options: ConvertOptions) -> dict[str, Any]:
        """What has to be the same for two runs to be one conversion."""
        return {
            "source": str(self.source.folder),
            "scale_rule": options.scale_rule,
            "include": list(options.include),
            "exclude": list(options.exclude),
            "shards": {name: header.digest for name, header in self.source.headers.items()},
        }


def make_plan(folder: Path, options: ConvertOptions) -> Plan:
    """Read a source and decide what is to be done. Writes nothing.

    Raises:
        ConversionFailed: With every problem found.
    """
    source = read_source(folder)
    selection = select(source.modules, options.include, options.exclude)
    modules: dict[str, list[Module]] = {name: [] for name in source.headers}
    for module in selection.modules.values():
        for name in {module.packed_in, module.scale_in}:
            modules[name].append(module)
    layouts = {
        name: plan_shard(name, header, modules[name]) for name, header in source.headers.items()
    }
    return Plan(source, selection, layouts, {n: tuple(found) for n, found in modules.items()})


def convert_checkpoint(
    source: Path, destination: Path, options: ConvertOptions | None = None
) -> Manifest:
    """Convert a checkpoint's MXFP4 modules to int4 and copy all else.

    Args:
        source: Folder with config.json and safetensors shards; links are followed.
        destination: New or empty, or begun by an earlier run and ``options.resume``.
        options: How.

    Returns:
        The manifest, as it stands in the destination.

    Raises:
        ConversionFailed: It cannot be done; nothing was written, or what was can be resumed.
        OSError: A file cannot be read or written; finished shards are kept for a resume.
    """
    options = options or ConvertOptions()
    target = Destination(destination)
    target.check_apart(source.resolve())
    target.check_may_begin(options.resume)
    plan = make_plan(source, options)
    with target.locked():
        target.check_may_begin(options.resume or target.state() == "begun")
        target.agree_on(plan.fingerprint(options))
        target.sweep()
        target.withdraw_index()
        records = {name: _kept(plan, target, name) for name in plan.layouts}
        for name, kept in records.items():
            if kept is None:
                records[name] = _convert(plan, target, name, options)
        done = {name: record for name, record in records.items() if record is not None}
        manifest = _complete(plan, target, options, done)
        target.finish()
    return manifest


def _kept(plan: Plan, target: Destination, name: str) -> ShardRecord | None:
    """The record of a shard that an earlier run finished, proven by its checksum."""
    found = target.remembered(name)
    file = target.folder / name
    if found is None or not file.is_file():
        return None
    record, stamps = found
    if stamps != _stamps(plan, name) or digest_file(file) != record.result:
        return None
    return record


def _stamps(plan: Plan, name: str) -> dict[str, Stamp]:
    """Stamps of the source files that a result shard is made of."""
    files = {name}
    for module in plan.modules[name]:
        files |= {module.packed_in, module.scale_in}
    return {file: Stamp.of(plan.source.folder / file) for file in sorted(files)}


def _convert(plan: Plan, target: Destination, name: str, options: ConvertOptions) -> ShardRecord:
    stamps = _stamps(plan, name)
    partial = target.partial_path(name)
    job = Job(
        str(plan.source.folder),
        name,
        str(partial),
        plan.modules[name],
        options.scale_rule,
        options.device,
    )
    try:
        record = convert_shard(job)
        if _stamps(plan, name) != stamps:
            raise ConversionFailed(f"{name}: the source changed while it was read")
        target.remember(name, record, stamps)
        target.place(partial, name)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return record


def _complete(
    plan: Plan,
    target: Destination,
    options: ConvertOptions,
    records: dict[str, ShardRecord],
) -> Manifest:
    """Write everything but the shards; the index last."""
    files: dict[str, FileRecord] = {
        name: target.copy(plan.source.folder / name, name) for name in plan.source.others
    }
    config = converted_config(plan.source.config, plan.selection.converted, plan.selection.kept)
    files["config.json"] = target.write("config.json", json.dumps(config, indent=2).encode())
    manifest = Manifest(
        source=str(plan.source.folder),
        scale_rule=options.scale_rule,
        include=options.include,
        exclude=options.exclude,
        shards=records,
        files=files,
        tools={name: importlib.metadata.version(name) for name in _TOOLS},
    )
    target.write(MANIFEST_NAME, manifest.text().encode())
    index = {
        "metadata": plan.source.index_metadata
        | {"total_size": sum(layout.data_bytes for layout in plan.layouts.values())},
        "weight_map": {
            tensor.name: name for name, layout in plan.layouts.items() for tensor in layout.tensors
        },
    }
    target.write(INDEX_NAME, (json.dumps(index, indent=1) + "\n").encode())
    return manifest
