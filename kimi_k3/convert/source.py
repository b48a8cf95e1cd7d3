# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads a source checkpoint's index and headers and says everything that is wrong, at once.

No tensor byte is read. What comes out names every module to convert and where its bytes lie.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3_checkpoint.headers import (
    Entry,
    Header,
    HeaderError,
    read_full_header,
    unique_pairs,
)
from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.manifest import MANIFEST_NAME
from kimi_k3.convert.options import ConversionFailed, resolved, shown
from kimi_k3.convert.quantization import check_config

GROUP = 32
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
# What a module in MXFP4 may have beside its codes and scales.
_PASSENGERS = frozenset({"bias"})
# Rows or bytes of a row; only an empty tensor could have more.
_LARGEST = 1 << 48
# Of fused experts in the form of gpt-oss.
_GPT_OSS = ("_blocks", "_scales")
# Left behind by tools that fetch checkpoints; no part of one.
NOT_COPIED = frozenset({".git", ".cache"})
_REWRITTEN = frozenset({INDEX_NAME, "config.json"})
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


@dataclass
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
    headers: dict[str, Header] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)
    index_metadata: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()


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
    problems: list[str] = []
    source = Source(folder, _read_config(folder, problems))
    of_shards: list[str] = []
    located = _read_shards(source, of_shards)
    owner = _find_owners(source, located, of_shards)
    # Nothing can be said about partners while shards are missing or broken.
    problems += of_shards or _find_modules(source, owner)
    source.others = tuple(_find_others(folder, set(source.headers), destination, problems))
    if destination is not None:
        files = (folder / name for name in (*source.headers, *source.others, *_REWRITTEN))
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
    return source


def _read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    if (folder / "config.json").exists() and not (folder / "config.json").is_file():
        problems.append("config.json: no regular file")
        return {}
    try:
        text = (folder / "config.json").read_bytes()
        config = json.loads(text, object_pairs_hook=unique_pairs)
    except FileNotFoundError:
        problems.append("config.json: not there")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"config.json: expected JSON, found {error}")
    else:
        if isinstance(config, dict):
            problems += [f"config.json: {problem}" for problem in check_config(config)]
            return config
        problems.append(f"config.json: expected an object, found {type(config).__name__}")
    return {}


def _read_shards(source: Source, problems: list[str]) -> dict[str, str] | None:
    """Fill in the headers; the index's map, or None without an index."""
    folder = source.folder
    there = {file.name for file in folder.iterdir() if file.suffix == ".safetensors"}
    located = None
    if (folder / INDEX_NAME).exists():
        try:
            if not (folder / INDEX_NAME).is_file():
                raise ValueError("no regular file")
            index = json.loads((folder / INDEX_NAME).read_bytes(), object_pairs_hook=unique_pairs)
            located = index["weight_map"]
            source.index_metadata = index.get("metadata") or {}
            _check_index(located, source.index_metadata)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problems.append(f"{INDEX_NAME}: no index of safetensors shards: {error!r}")
            return None
        counts = Counter(located.values())
        problems += [
            f"{shown(name)}: a shard that the index does not name"
            for name in sorted(there - counts.keys())
        ]
        problems += [
            f"{shown(name)}: not there; the index names it for {count:,} tensors"
            for name, count in sorted(counts.items())
            if name not in there
        ]
        there &= counts.keys()
    elif not there:
        problems.append(f"no {INDEX_NAME} and no *.safetensors file")
    for name in sorted(there):
        if (folder / name).exists() and not (folder / name).is_file():
            problems.append(f"{shown(name)}: no regular file")
            continue
        try:
            source.headers[name] = read_full_header(folder / name)
        except FileNotFoundError:
            problems.append(f"{shown(name)}: a link to a file that is not there")
        except (HeaderError, OSError) as error:
            problems.append(f"{shown(name)}: {error}")
    return located


def _check_index(located: object, metadata: object) -> None:
    if not isinstance(located, dict) or not isinstance(metadata, dict):
        raise ValueError("expected objects as weight_map and metadata")
    for name in set(located.values()):
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise ValueError(f"expected names of *.safetensors files, found {name!r}")
        if Path(name).name != name:
            raise ValueError(f"expected names of files in the same folder, found {name!r}")


def _find_owners(
    source: Source, located: dict[str, str] | None, problems: list[str]
) -> dict[str, str]:
    """Tensor -> shard; adds duplicates and what the index says otherwise to ``problems``."""
    owner: dict[str, str] = {}
    for name, header in source.headers.items():
        for tensor in header.entries.keys() & owner.keys():
            problems.append(f"{shown(tensor)}: in {owner[tensor]} and again in {shown(name)}")
        owner |= dict.fromkeys(header.entries, name)
    if located is None:
        return owner
    for tensor, name in located.items():
        # A shard that could not be read is named already.
        if name in source.headers and owner.get(tensor) != name:
            where = shown(owner.get(tensor, "no shard"))
            problems.append(f"{shown(tensor)}: the index says {shown(name)}, it is in {where}")
    problems += [
        f"{shown(tensor)}: in {shown(owner[tensor])}, and not in the index"
        for tensor in owner.keys() - located.keys()
    ]
    return owner


def _find_modules(source: Source, owner: dict[str, str]) -> Iterator[str]:
    """Fill in the modules in MXFP4; yields what is wrong with them."""
    parts: dict[str, dict[str, Entry]] = {}
    fused: list[str] = []
    for header in source.headers.values():
        for tensor, entry in header.entries.items():
            module, _, leaf = tensor.rpartition(".")
            parts.setdefault(module, {})[leaf] = entry
            if ".experts." in tensor and leaf.endswith(_GPT_OSS):
                fused.append(tensor)
    if fused:
        yield (
            f"{shown(fused[0])} and {len(fused) - 1} more: fused experts in the form of gpt-oss, "
            f"which is not supported; expected a {PACKED} and a {SCALE} for each expert"
        )
    for module, tensors in parts.items():
        if PACKED in tensors:
            found = list(_check_module(tensors))
            if not module:
                found.append(f"{PACKED}: expected the name of a module before it")
            yield from (f"{shown(module)}.{problem}" for problem in found)
            if not found:
                rows, half = tensors[PACKED].shape
                source.modules[module] = Module(
                    module,
                    rows,
                    2 * half,
                    owner[f"{module}.{PACKED}"],
                    owner[f"{module}.{SCALE}"],
                )
        elif SCALE in tensors and "weight" not in tensors:
            yield f"{shown(module)}.{SCALE}: there without its {PACKED}"
    if not source.modules and not fused:
        yield f"no {PACKED} in any shard: there is no module in MXFP4 to convert"


def _check_module(tensors: dict[str, Entry]) -> Iterator[str]:
    packed, scale = tensors[PACKED], tensors.get(SCALE)
    if scale is None:
        yield f"{PACKED}: there without its {SCALE}"
    for leaf in sorted(tensors.keys() - {PACKED, SCALE} - _PASSENGERS):
        yield f"{leaf}: unexpected beside {PACKED} in MXFP4"
    if packed.dtype == "I32":
        yield f"{PACKED}: found I32, which is int4 already; expected U8 codes in MXFP4"
        return
    flat = len(packed.shape) == 2 and max(packed.shape) < _LARGEST
    if packed.dtype != "U8" or not flat or packed.shape[1] % (GROUP // 2):
        yield (
            f"{PACKED}: expected U8 [N, K/2] with K a multiple of {GROUP}, found "
            f"{packed.dtype} {list(packed.shape)}"
        )
        return
    expected = (packed.shape[0], packed.shape[1] // (GROUP // 2))
    if scale is not None and (scale.dtype not in ("U8", "F8_E8M0") or scale.shape != expected):
        yield (
            f"{SCALE}: expected U8 or F8_E8M0 {list(expected)}, found "
            f"{scale.dtype} {list(scale.shape)}"
        )


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
