# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 make-checkpoint`: a Kimi-K3 checkpoint with random weights, for tests and rehearsals.

Parses and prints; `checkpoint.write` does the work, and imports torch only when it is to be done.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.spec import ExpertFormat, ModelSpec, Stack

if TYPE_CHECKING:
    from k3_checkpoint.shards import Shard

HEADERS_ONLY = "k3-shapes"
_DEFAULT_SHARDS = {"tiny": 3, "small": 4, HEADERS_ONLY: 96}


def _size(text: str) -> Any:
    return typer.Option(metavar="N", help=text, show_default=False)


def make_checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")],
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="tiny (5 layers, 9 MB), small (8 layers, 258 MB), or k3-shapes (Kimi-K3's own "
            "1.56 TB, as headers alone). The sizes below change it.",
        ),
    ] = "tiny",
    layers: Annotated[int | None, _size("Layers.")] = None,
    heads: Annotated[int | None, _size("Attention heads.")] = None,
    head_dim: Annotated[int | None, _size("Channels of a KDA head.")] = None,
    hidden_size: Annotated[
        int | None, _size("Channels of the model; even, and over the heads as well.")
    ] = None,
    latent_size: Annotated[
        int | None, _size("Channels that routed experts work on; a multiple of 32.")
    ] = None,
    experts: Annotated[int | None, _size("Routed experts a layer.")] = None,
    experts_per_token: Annotated[int | None, _size("Routed experts that a token uses.")] = None,
    expert_intermediate_size: Annotated[
        int | None, _size("Inner channels of an expert; a multiple of 32.")
    ] = None,
    vocab_size: Annotated[int | None, _size("Entries of the vocabulary.")] = None,
    shards: Annotated[
        int | None, _size("Safetensors files: 3 for tiny, 4 for small, 96 for k3-shapes.")
    ] = None,
    experts_format: Annotated[
        ExpertFormat,
        typer.Option(metavar="KIND", help="How routed experts are stored: mxfp4 or bf16."),
    ] = ExpertFormat.MXFP4,
    stack: Annotated[
        Stack,
        typer.Option(
            metavar="KIND",
            help="Attention of the layers: kda, mla, or mixed (every fourth layer and the last "
            "one are MLA).",
        ),
    ] = Stack.MIXED,
    text_only: Annotated[
        bool, typer.Option("--text-only/--full", help="Without or with the vision tower.")
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of all values: the same one gives the same files.")
    ] = 0,
) -> None:
    """Write a Kimi-K3 checkpoint with random weights, for tests and rehearsals.

    Names, shapes and formats are those of the published checkpoint; nothing is downloaded. The
    preset k3-shapes writes 497,220 headers in sparse files that take 140 MB of disk.
    """
    if preset not in PRESETS:
        raise typer.BadParameter(f"expected one of {', '.join(PRESETS)}, found {preset!r}")
    sizes: dict[str, Any] = {
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


def _write_with_progress(
    folder: Path, spec: ModelSpec, *, shards: int, **kwargs: Any
) -> list["Shard"]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from k3_checkpoint.write import write_checkpoint

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
