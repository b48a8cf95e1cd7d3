# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Is this folder a complete Kimi-K3 checkpoint? Told from its index and headers, before any load.

A load that lacks a tensor either fails late without naming the file or, with quantized experts,
does not fail at all and serves zeros. The check lists everything that is wrong at once. It reads
no tensor and changes nothing.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path

from k3_checkpoint.headers import (
    Entry,
    HeaderError,
    read_header,
    unique_pairs,
)
from k3_checkpoint.shards import INDEX_NAME
from k3_checkpoint.spec import ModelSpec
from k3_checkpoint.tensors import Role, TensorSpec, checkpoint_tensors

_FLOATS = frozenset({"BF16", "F16", "F32"})
_SHOWN = 12


class CheckpointError(ValueError):
    """A folder is no complete checkpoint of its model; the message lists what is wrong."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        more = len(problems) - _SHOWN
        lines = [f"  - {problem}" for problem in problems[:_SHOWN]]
        if more > 0:
            lines.append(f"  - and {more} more")
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"{folder} is not a complete Kimi-K3 checkpoint, {count}:\n"
            + "\n".join(lines)
            + "\nFetch or write the named files again."
        )
        self.problems = problems


def check_checkpoint(folder: Path, spec: ModelSpec, *, experts: bool = True) -> None:
    """Compare a folder's index and shard headers with what its model needs.

    Args:
        folder: holds safetensors shards and, for more than one, their index.
        spec: the model, from the folder's config.json.
        experts: also hold the routed experts to the format that ``spec`` names.

    Raises:
        CheckpointError: with every problem found.

    """
    problems: list[str] = []
    found = _read_shards(folder, problems)
    # Nothing can be said about tensors while shards are missing or broken.
    if not problems:
        problems += _compare(found, spec, experts)
    if problems:
        raise CheckpointError(folder, problems)


def _read_shards(folder: Path, problems: list[str]) -> dict[str, Entry]:
    """Tensors of all shards by name; adds what is wrong with files and index to ``problems``."""
    index = folder / INDEX_NAME
    located: dict[str, str] = {}
    if index.exists():
        try:
            located = json.loads(index.read_text(), object_pairs_hook=unique_pairs)["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{INDEX_NAME}: {error}")
            return {}
        files = sorted(set(located.values()))
    else:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        if not files:
            problems.append(f"no {INDEX_NAME} and no *.safetensors file")
    counts: dict[str, int] = defaultdict(int)
    for name in located.values():
        counts[name] += 1
    tensors: dict[str, Entry] = {}
    owner: dict[str, str] = {}
    for name in files:
        file = folder / name
        if not file.exists():
            problems.append(f"{name}: not there; the index names it for {counts[name]:,} tensors")
            continue
        try:
            entries = read_header(file)
        except HeaderError as error:
            problems.append(f"{name}: {error}")
            continue
        for tensor in entries.keys() & owner.keys():
            problems.append(f"{tensor}: in {owner[tensor]} and again in {name}")
        tensors |= entries
        owner |= dict.fromkeys(entries, name)
    if not problems:
        for tensor, name in located.items():
            if owner.get(tensor) != name:
                where = owner.get(tensor, "no shard")
                problems.append(f"{tensor}: the index says {name}, it is in {where}")
    return tensors


def _compare(found: dict[str, Entry], spec: ModelSpec, experts: bool) -> Iterator[str]:
    """Problems of tensors, those of one expert in one line."""
    missing: dict[str, list[str]] = defaultdict(list)
    for tensor in checkpoint_tensors(spec):
        is_expert = tensor.unit != tensor.name
        if is_expert and not experts:
            continue
        entry = found.get(tensor.name)
        if entry is None:
            missing[tensor.unit].append(tensor.name)
        elif (problem := _differs(tensor, entry, spec)) is not None:
            yield f"{tensor.name}: {problem}"
    for unit, names in missing.items():
        if unit == names[0]:
            yield f"{unit}: in no shard"
        else:
            parts = ", ".join(name.removeprefix(unit) for name in names)
            yield f"{unit.rstrip('.')}: {parts} in no shard"


def _differs(tensor: TensorSpec, entry: Entry, spec: ModelSpec) -> str | None:
    if tensor.role is Role.A_LOG:
        # Stored flat with padding, or as (1, 1, H, 1); the heads come first in both.
        fits = prod(entry.shape) >= spec.heads and entry.dtype in _FLOATS
        expected = f"at least {spec.heads} floating-point values"
    elif tensor.dtype == "U8":
        fits = (entry.dtype, entry.shape) in (
            (tensor.dtype, tensor.shape),
            ("F8_E8M0", tensor.shape if tensor.role is Role.SCALES else ()),
        )
        expected = f"{tensor.dtype} {list(tensor.shape)}"
    else:
        fits = entry.dtype in _FLOATS and entry.shape == tensor.shape
        expected = f"BF16, F16 or F32 {list(tensor.shape)}"
    return None if fits else f"expected {expected}, found {entry.dtype} {list(entry.shape)}"
