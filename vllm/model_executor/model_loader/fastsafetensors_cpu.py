# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads safetensors shards with the fastsafetensors library into host memory.

For platforms without a GPU; it never asks for GPU direct storage. Every rank reads for itself: on
one host the page cache shares the files, and nothing has to be sent from rank to rank.
"""

import re
from collections.abc import Iterator

import torch


def iterate(
    hf_weights_files: list[str], use_tqdm_on_load: bool, *_: object, **__: object
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the given shards; further options of upstream's steer a GPU's queue.

    Args:
        hf_weights_files: paths; they are read in natural order.
        use_tqdm_on_load: show a progress bar.

    Yields:
        Name and tensor. A tensor lies in the shard's buffer and is gone when the next shard comes.

    Raises:
        ImportError: the library is not installed.

    """
    try:
        from fastsafetensors import SingleGroup
        from fastsafetensors.parallel_loader import ParallelLoader
    except ImportError as error:
        raise ImportError(
            "--load-format fastsafetensors needs the fastsafetensors package: install it, or use "
            "--load-format safetensors"
        ) from error
    loader = ParallelLoader(
        pg=SingleGroup(),
        hf_weights_files=sorted(hf_weights_files, key=_natural),
        use_tqdm_on_load=use_tqdm_on_load,
        device="cpu",
        nogds=True,
    )
    try:
        yield from loader.iterate_weights()
    finally:
        loader.close()


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key under which shard 10 comes after shard 9."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", path)]
