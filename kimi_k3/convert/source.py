# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What of a checkpoint can be converted, or everything that keeps it from that, at once.

No tensor byte is read. What comes out names every module to convert and where its bytes lie.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_checkpoint import Checkpoint, Kind
from k3_checkpoint.files import CONFIG_NAME
from k3_checkpoint.formats import PACKED as PACKED
from k3_checkpoint.formats import SCALE as SCALE
from k3_checkpoint.formats import SHAPE as SHAPE
from k3_checkpoint.headers import Entry, Header
from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.manifest import MANIFEST_NAME
from kimi_k3.convert.options import ConversionFailed, resolved, shown
from kimi_k3.convert.quantization import check_config
from mxfp4_int4 import GROUP_SIZE

# What a module in MXFP4 may have beside its codes and scales.
_BESIDE = frozenset({"bias"})
# Rows or bytes of a row; only an empty tensor could have more.
_LARGEST = 1 << 48
# Of fused experts in the form of gpt-oss.
_GPT_OSS = ("_blocks", "_scales")
# Left behind by tools that fetch checkpoints; no part of one.
NOT_COPIED = frozenset({".git", ".cache"})
_REWRITTEN = frozenset({INDEX_NAME, CONFIG_NAME})
# Of `destination`: where an unfinished conversion keeps its account.
WORK_NAME = ".kimi_k3_conversion"


@dataclass(frozen=True, slots=True)
class Module:
    """One matrix in MXFP4, `[rows, columns]`, and the shards that hold its two tensors."""

    name: str
    rows: int
    columns: int
    packed_in: str
    scale_in: str


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be converted.

    Attributes:
        folder: Resolved.
        config: Contents of config.json.
        headers: Shard -> header.
        modules: Name -> module, those that stay as they are included.
        index_metadata: What the index says beside its map.
        others: Files to copy, relative to the folder; no shard, index, or config.json.
    """

    folder: Path
    config: dict[str, Any]
    headers: dict[str, Header]
    modules: dict[str, Module]
    index_metadata: dict[str, Any]
    others: tuple[str, ...]


def read_source(folder: Path, destination: Path | None = None) -> Source:
    """Read and judge a checkpoint.

    Args:
        folder: The checkpoint.
        destination: Where its conversion is to be, resolved; no link in the source may lead there.

    Raises:
        ConversionFailed: With every problem found.
    """
    try:
        return _read_source(resolved(folder), destination)
    except OSError as error:
        raise ConversionFailed(
            f"{shown(error.filename or folder)}: cannot be read: {error.strerror}. Nothing was "
            "written"
        ) from error
    except RecursionError as error:
        raise ConversionFailed(
            f"{shown(folder)}: its config.json is nested too deeply. Nothing was written"
        ) from error


def _read_source(folder: Path, destination: Path | None) -> Source:
    if not folder.is_dir():
        raise ConversionFailed(f"{shown(folder)}: expected a checkpoint's folder, found none")
    if (folder / MANIFEST_NAME).exists():
        raise ConversionFailed(
            f"{shown(folder)} is converted already: it has a {MANIFEST_NAME}. Convert the "
            "checkpoint that it names as its source"
        )
    if (folder / WORK_NAME).exists():
        raise ConversionFailed(
            f"{shown(folder)} is the destination of an unfinished conversion. Name its source"
        )
    opened = Checkpoint.open(folder)
    of_shards = [str(problem) for problem in opened.problems if problem.kind is not Kind.CONFIG]
    problems = [str(problem) for problem in opened.of_kind(Kind.CONFIG)]
    if not problems:
        problems += [f"{CONFIG_NAME}: {problem}" for problem in check_config(opened.config)]
    modules: dict[str, Module] = {}
    # Nothing can be said about partners while shards are missing or broken.
    problems += of_shards or _find_modules(opened, modules)
    others = tuple(_find_others(folder, set(opened.headers), destination, problems))
    if destination is not None:
        files = (folder / name for name in (*opened.headers, *others, *_REWRITTEN))
        problems += [
            f"{shown(file.relative_to(folder))}: a link into the destination"
            for file in files
            if file.is_file() and file.resolve().is_relative_to(destination)
        ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConversionFailed(
            f"{shown(folder)} cannot be converted, {count}:",
            problems,
            "Nothing was written. Fetch the named files again, or name another checkpoint.",
        )
    return Source(folder, opened.config, opened.headers, modules, opened.metadata, others)


def _find_modules(checkpoint: Checkpoint, modules: dict[str, Module]) -> Iterator[str]:
    """Fill in the modules in MXFP4; yields what is wrong with them."""
    codes: list[str] = []
    scales: list[str] = []
    beside: dict[str, set[str]] = defaultdict(set)
    fused: list[str] = []
    for tensor in checkpoint.owner:
        module, _, leaf = tensor.rpartition(".")
        if leaf == PACKED:
            codes.append(tensor)
        elif leaf == SCALE:
            scales.append(tensor)
        else:
            beside[module].add(leaf)
            if ".experts." in tensor and leaf.endswith(_GPT_OSS):
                fused.append(tensor)
    if fused:
        yield (
            f"{shown(fused[0])} and {len(fused) - 1} more: fused experts in the form of gpt-oss, "
            f"which is not supported; expected a {PACKED} and a {SCALE} for each expert"
        )
    for tensor in codes:
        name = tensor.rpartition(".")[0]
        scale = tensor.removesuffix(PACKED) + SCALE
        packed = checkpoint.headers[checkpoint.owner[tensor]].entries[tensor]
        found = list(_check_module(packed, checkpoint.entry(scale), beside.get(name, set())))
        if not name:
            found.append(f"{PACKED}: expected the name of a module before it")
        yield from (f"{shown(name)}.{problem}" for problem in found)
        if not found:
            rows, half = packed.shape
            places = checkpoint.owner[tensor], checkpoint.owner[scale]
            modules[name] = Module(name, rows, 2 * half, *places)
    for tensor in scales:
        name = tensor.rpartition(".")[0]
        lacking = tensor.removesuffix(SCALE) + PACKED not in checkpoint.owner
        if lacking and "weight" not in beside.get(name, ()):
            yield f"{shown(name)}.{SCALE}: there without its {PACKED}"
    if not modules and not fused:
        yield f"no {PACKED} in any shard: there is no module in MXFP4 to convert"


def _check_module(packed: Entry, scale: Entry | None, beside: set[str]) -> Iterator[str]:
    if scale is None:
        yield f"{PACKED}: there without its {SCALE}"
    for leaf in sorted(beside - _BESIDE):
        yield f"{leaf}: unexpected beside {PACKED} in MXFP4"
    if packed.dtype == "I32":
        yield f"{PACKED}: found I32, which is int4 already; expected U8 codes in MXFP4"
        return
    flat = len(packed.shape) == 2 and max(packed.shape) < _LARGEST
    if packed.dtype != "U8" or not flat or packed.shape[1] % (GROUP_SIZE // 2):
        yield f"{PACKED}: expected U8 [N, K/2] with K a multiple of {GROUP_SIZE}, found {packed}"
        return
    expected = (packed.shape[0], packed.shape[1] // (GROUP_SIZE // 2))
    if scale is not None and (scale.dtype not in ("U8", "F8_E8M0") or scale.shape != expected):
        yield f"{SCALE}: expected U8 or F8_E8M0 {list(expected)}, found {scale}"


def _find_others(
    folder: Path, shards: set[str], destination: Path | None, problems: list[str]
) -> Iterator[str]:
    """Files to copy, links followed; a link back up the tree is a problem, not a loop, and so is
    one by which the destination would be copied into itself."""
    special = shards | _REWRITTEN

    def walk(at: Path, above: frozenset[Path]) -> Iterator[str]:
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            path = at / entry.name
            name = str(path.relative_to(folder))
            if entry.name in NOT_COPIED or (at == folder and name in special):
                continue
            if entry.is_dir():
                below = path.resolve()
                if below in above:
                    problems.append(f"{shown(name)}: a link to a folder that it lies in")
                elif destination is not None and _meet(below, destination):
                    problems.append(f"{shown(name)}: a link to the destination, in or around it")
                else:
                    yield from walk(path, above | {below})
            elif entry.is_file():
                if not os.access(path, os.R_OK):
                    problems.append(f"{shown(name)}: may not be read by this user")
                yield name
            # Shards are judged by what the index and their headers say.
            elif at != folder or path.suffix != ".safetensors":
                kind = "no regular file" if path.exists() else "a link to nothing"
                problems.append(f"{shown(name)}: {kind}")

    yield from walk(folder, frozenset({folder}))


def _meet(place: Path, destination: Path) -> bool:
    """Whether one of two folders, both resolved, is the other or lies in it."""
    if place.is_relative_to(destination) or destination.is_relative_to(place):
        return True
    # The same folder under another path, as mounts make it.
    return destination.exists() and place.samefile(destination)
