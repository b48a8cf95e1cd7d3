# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Writes a Kimi-K3 checkpoint with random weights: config, tokenizer, shards and, last, the index.

Nothing is downloaded, and an existing folder with files in it is never written into.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from k3_checkpoint.shards import Shard, split, write_index, write_shard
from k3_checkpoint.spec import ModelSpec
from k3_checkpoint.tensors import Role, TensorSpec, checkpoint_tensors
from k3_checkpoint.tokenizer import write_tokenizer
from k3_checkpoint.values import draw, draw_mxfp4


def write_checkpoint(
    folder: Path,
    spec: ModelSpec,
    *,
    shards: int,
    seed: int = 0,
    headers_only: bool = False,
    on_shard: Callable[[Shard], None] = lambda shard: None,
) -> list[Shard]:
    """Write config, tokenizer, shards and, last, the index.

    Args:
        folder: created; must not exist or be empty.
        spec: the model's sizes.
        shards: number of safetensors files.
        seed: of all values and of the order of experts.
        headers_only: write shards of the right size that are a header and a hole.
        on_shard: called when a shard is complete.

    Returns:
        The shards.

    Raises:
        FileExistsError: the folder has files in it.
        ValueError: sizes or a number of shards that do not fit.

    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{folder}: expected a new or empty folder, found files in it. If they are an "
            "unfinished checkpoint, delete the folder and run again"
        )
    parts = split(checkpoint_tensors(spec, seed), shards)
    folder.mkdir(parents=True, exist_ok=True)
    # First, because it refuses a vocabulary that is too small or too large, and writes nothing.
    write_tokenizer(folder, spec.vocab_size)
    (folder / "config.json").write_text(json.dumps(spec.config(), indent=2) + "\n")
    if spec.vision is not None:
        (folder / "preprocessor_config.json").write_text(
            json.dumps(spec.preprocessor_config(), indent=2) + "\n"
        )

    def contents(tensors: tuple[TensorSpec, ...]) -> Iterator[torch.Tensor]:
        scales: dict[str, torch.Tensor] = {}
        for tensor in tensors:
            if tensor.role is Role.CODES:
                codes, scale = draw_mxfp4(tensor, seed)
                scales[tensor.name.replace("_packed", "_scale")] = scale
                yield codes
            elif tensor.role is Role.SCALES:
                yield scales.pop(tensor.name)
            else:
                yield draw(tensor, seed, heads=spec.heads)

    for shard in parts:
        write_shard(folder, shard, None if headers_only else contents)
        on_shard(shard)
    write_index(folder, parts)
    return parts
