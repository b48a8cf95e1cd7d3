# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 make-checkpoint`: a Kimi-K3 checkpoint with random weights, for tests and rehearsals.

The command parses and prints; `write_checkpoint` does the work. Nothing is downloaded, and an
existing folder with files in it is never written into.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from vllm.entrypoints.kimi_k3.checkpoint.shards import Shard, split, write_index, write_shard
from vllm.entrypoints.kimi_k3.checkpoint.spec import PRESETS, ExpertFormat, ModelSpec, Stack
from vllm.entrypoints.kimi_k3.checkpoint.tensors import Role, TensorSpec, checkpoint_tensors
from vllm.entrypoints.kimi_k3.checkpoint.tokenizer import write_tokenizer
from vllm.entrypoints.kimi_k3.checkpoint.values import draw, draw_mxfp4

HEADERS_ONLY = "k3-shapes"
_DEFAULT_SHARDS = {"tiny": 3, "small": 4, HEADERS_ONLY: 96}


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
        raise FileExistsError(f"{folder}: expected a new or empty folder, found files in it")
    parts = split(checkpoint_tensors(spec, seed), shards)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec.config(), indent=2) + "\n")
    if spec.vision is not None:
        (folder / "preprocessor_config.json").write_text(
            json.dumps(spec.preprocessor_config(), indent=2) + "\n"
        )
    write_tokenizer(folder, spec.vocab_size)

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


def make_checkpoint(
    directory: Annotated[Path, typer.Argument(help="New or empty folder.")],
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels of a KDA head.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    latent_size: Annotated[int | None, typer.Option(help="Hidden size of experts.")] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts a layer.")] = None,
    experts_per_token: Annotated[int | None, typer.Option(help="Experts a token.")] = None,
    expert_intermediate_size: Annotated[
        int | None, typer.Option(help="Intermediate size of an expert.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Entries of the vocabulary.")] = None,
    shards: Annotated[int | None, typer.Option(help="Safetensors files.")] = None,
    experts_format: Annotated[
        ExpertFormat, typer.Option(help="How routed experts are stored.")
    ] = ExpertFormat.MXFP4,
    stack: Annotated[Stack, typer.Option(help="Kinds of attention layers.")] = Stack.MIXED,
    text_only: Annotated[
        bool, typer.Option("--text-only/--full", help="Without or with the vision tower.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of all values.")] = 0,
) -> None:
    """Write a Kimi-K3 checkpoint with random weights.

    tiny has 5 small layers (5 MB), small has 8 (170 MB); k3-shapes has Kimi-K3's 497,220 tensors at
    their full 1.56 TB, as headers of sparse files that take about 200 MB of disk.
    """
    if preset not in PRESETS:
        raise typer.BadParameter(f"expected one of {', '.join(PRESETS)}, found {preset!r}")
    sizes = {
        "layers": layers,
        "heads": heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "latent_size": latent_size,
        "experts": experts,
        "experts_per_token": experts_per_token,
        "expert_intermediate_size": expert_intermediate_size,
        "vocab_size": vocab_size,
    }
    chosen = {name: value for name, value in sizes.items() if value is not None}
    base = PRESETS[preset]
    try:
        spec = replace(
            base,
            **chosen,
            stack=stack,
            expert_format=experts_format,
            vision=None if text_only else base.vision,
        )
        written = _write_with_progress(
            directory,
            spec,
            shards=_DEFAULT_SHARDS[preset] if shards is None else shards,
            seed=seed,
            headers_only=preset == HEADERS_ONLY,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    tensors = sum(len(s.tensors) for s in written)
    size = sum(s.nbytes for s in written)
    typer.echo(f"{directory}: {tensors:,} tensors, {size / 1e9:,.3f} GB in {len(written)} shards")


def _write_with_progress(folder: Path, spec: ModelSpec, *, shards: int, **kwargs) -> list[Shard]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("writing shards"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("shards", total=shards)
        return write_checkpoint(
            folder, spec, shards=shards, on_shard=lambda shard: progress.advance(task), **kwargs
        )
