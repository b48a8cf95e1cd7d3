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

from k3_checkpoint import Checkpoint, Kind

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
# A rehearsal is of the shards that the index names; config.json is judged elsewhere.
_OF_NO_MATTER = (Kind.CONFIG, Kind.UNNAMED)


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
    checkpoint = Checkpoint.open(folder)
    if (missing := checkpoint.missing_shards()) is not None:
        raise FileNotFoundError(missing)
    # vLLM reads what the shards hold and never compares it with the index.
    wrong = [p for p in checkpoint.problems if p.kind not in _OF_NO_MATTER]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{folder}: {'; '.join(map(str, wrong[:3]))}{more}")
    everything = list(_read(checkpoint))
    if order is Order.REVERSE:
        everything.reverse()
    elif order is Order.SHUFFLED:
        random.Random(seed).shuffle(everything)
    yield from everything


def _read(checkpoint: Checkpoint) -> Iterator[Header]:
    for shard, header in checkpoint.headers.items():
        for name, entry in header.entries.items():
            if entry.dtype not in _DTYPES:
                raise ValueError(f"{shard}: {name} has the unknown dtype {entry.dtype}")
            yield name, _DTYPES[entry.dtype], list(entry.shape)


def tensors(found: Iterator[Header]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor on the meta device, where it has a shape and no memory."""
    for name, dtype, shape in found:
        yield name, torch.empty(shape, dtype=dtype, device="meta")
