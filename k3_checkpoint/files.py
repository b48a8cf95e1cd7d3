# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads config.json and the index, and finds the folder of a model in the local hub cache."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from k3_checkpoint.headers import has_strings, unique_pairs
from k3_checkpoint.shards import INDEX_NAME

CONFIG_NAME = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_INDEX = msgspec.json.Decoder(_Index)


class NoSuchModelError(ValueError):
    """Neither a folder nor the id of a model on the hub."""


def find_folder(name: str) -> Path | None:
    """Find a checkpoint's folder: a path, or a hub id in the local cache. Fetches nothing.

    Returns:
        The folder; None for a hub id that is not in the cache.

    Raises:
        NoSuchModelError: The name can be neither.
    """
    path = Path(name)
    if name and path.is_dir():
        return path
    if name and path.exists():
        raise NoSuchModelError(f"{name}: expected a checkpoint's folder, found a file")
    if not _HUB_ID.fullmatch(name):
        raise NoSuchModelError(
            f"{name!r}: expected a checkpoint's folder or a hub id such as moonshotai/Kimi-K3, "
            "found no such folder"
        )
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, CONFIG_NAME)
    return Path(found).parent if isinstance(found, str) else None


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of a checkpoint's config.json.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no JSON object, or names something twice.
    """
    return _read_object(_read_file(folder / CONFIG_NAME))


def read_index(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Tensor -> shard by the index, and what it says beside that.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no index of safetensors shards in the same folder.
    """
    text = _read_file(folder / INDEX_NAME)
    try:
        located, metadata = _decode_index(text)
    except (msgspec.DecodeError, RecursionError):
        found = _read_object(text)
        located, metadata = found.get("weight_map"), found.get("metadata") or {}
    if not isinstance(located, dict) or not located:
        raise ValueError(f"expected a weight_map of tensors to shards, found {located!r}")
    if not isinstance(metadata, dict):
        raise ValueError(f"expected an object as metadata, found {metadata!r}")
    names = list(located.values())
    odd = [name for name in names if not isinstance(name, str)] or [
        name for name in set(names) if Path(name).name != name or not name.endswith(".safetensors")
    ]
    if odd:
        raise ValueError(
            f"expected names of files beside it that end in .safetensors, found {odd[0]!r}"
        )
    return located, metadata


def _decode_index(text: bytes) -> tuple[Any, Any]:
    """Return map and metadata, or raise `msgspec.DecodeError` where `json` has to look again."""
    index = _INDEX.decode(text)
    described = b"" if index.metadata is msgspec.UNSET else bytes(index.metadata)
    strings = 1 + 2 * len(index.weight_map)
    if described:
        strings += 1 + described.count(b'"') // 2
    if not has_strings(text, strings):
        raise msgspec.DecodeError
    return index.weight_map, _read_json(described or b"{}") or {}


def _read_file(file: Path) -> bytes:
    if file.exists() and not file.is_file():
        # A pipe would be waited for, and a device read without end.
        raise ValueError("no regular file")
    return file.read_bytes()


def _read_json(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, found {error}") from error


def _read_object(text: bytes) -> dict[str, Any]:
    found = _read_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found
