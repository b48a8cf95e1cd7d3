# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which shards a checkpoint has, and what its index says they hold. Opens no shard; no torch."""

import re
from collections import defaultdict
from collections.abc import Set
from pathlib import Path

from kimi_k3.rehearsal.config import read_json

INDEX_NAME = "model.safetensors.index.json"


def shards(folder: Path) -> list[Path]:
    """Return a checkpoint's shards in the order in which vLLM reads them.

    Raises:
        FileNotFoundError: There are none, or one is missing: the index names it, or, without an
            index, the other names say how many there are.
        ValueError: The index is none.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        names = set(indexed(index))
    else:
        names = {file.name for file in folder.glob("*.safetensors")}
        for numbered in [re.fullmatch(r"(.*-)(\d+)(-of-(\d+)\.safetensors)", n) for n in names]:
            if numbered:
                prefix, position, suffix, count = numbered.groups()
                width = len(position)
                names |= {f"{prefix}{n:0{width}}{suffix}" for n in range(1, int(count) + 1)}
    files = [folder / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"{', '.join(missing[:5])} missing" if missing else "found none"
        raise FileNotFoundError(f"{folder}: expected a checkpoint's safetensors shards, {what}")
    return files


def indexed(index: Path) -> dict[str, set[str]]:
    """Return shard -> the tensors that the index says it holds.

    Raises:
        OSError: The index cannot be read.
        ValueError: It is none.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index}: expected a weight_map of tensors to shards, found {weight_map!r}"
        )
    located: dict[str, set[str]] = defaultdict(set)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: expected names of files beside it, found {name!r}")
        located[name].add(tensor)
    return located


def check_index(file: Path, found: Set[str], indexed: Set[str]) -> None:
    """Hold a shard to its index: vLLM reads what the shard holds and never compares the two.

    Raises:
        ValueError: They differ; some of the names are given.
    """
    for names, what in (
        (indexed - found, "the index places there, and it does not hold"),
        (found - indexed, "it holds, and the index does not place there"),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{file}: {len(names)} tensors that {what}: {shown}{more}")
