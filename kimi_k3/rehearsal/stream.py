# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A checkpoint's tensors as the loaders see them, from its headers alone, on the meta device.

Opens every shard and reads no tensor. Names, dtypes and shapes are the file's own.
"""

import random
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kimi_k3.rehearsal.index import INDEX_NAME, check_index, indexed, shards

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
Header = tuple[str, torch.dtype, list[int]]


class Order(StrEnum):
    """In which order a rehearsal hands out tensors."""

    INDEX = "index"  # shard by shard, as they lie in the files: what a real load does
    REVERSE = "reverse"
    SHUFFLED = "shuffled"  # all tensors at random, seeded


def headers(folder: Path, order: Order = Order.INDEX, seed: int = 0) -> Iterator[Header]:
    """Yield name, dtype and shape of every tensor.

    Args:
        folder: A checkpoint; ``kimi-k3 make-checkpoint --preset k3-shapes`` writes one of headers.
        order: Whether to keep the files' order. The others read all headers first.
        seed: For the shuffled order.

    Raises:
        ValueError: A shard is no complete safetensors file, holds an unknown dtype, or holds other
            tensors than the index says.
    """
    index = folder / INDEX_NAME
    located = indexed(index) if index.is_file() else None
    if order is Order.INDEX:
        for file in shards(folder):
            yield from _read(file, located)
        return
    everything = [header for file in shards(folder) for header in _read(file, located)]
    if order is Order.REVERSE:
        everything.reverse()
    else:
        random.Random(seed).shuffle(everything)
    yield from everything


def _read(file: Path, located: dict[str, set[str]] | None) -> Iterator[Header]:
    try:
        with safe_open(file, framework="pt") as shard:
            names = shard.offset_keys()
            if located is not None:
                check_index(file, set(names), located[file.name])
            for name in names:
                part = shard.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in _DTYPES:
                    raise ValueError(f"{file}: {name} has the unknown dtype {dtype}")
                yield name, _DTYPES[dtype], part.get_shape()
    except SafetensorError as error:
        raise ValueError(f"{file}: expected a complete safetensors file: {error}") from error


def tensors(found: Iterator[Header]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor on the meta device, where it has a shape and no memory."""
    for name, dtype, shape in found:
        yield name, torch.empty(shape, dtype=dtype, device="meta")
