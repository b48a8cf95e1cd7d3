# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 rehearse`: the load of a checkpoint of any size, on a laptop, from its headers.

Parses and prints; `rehearsal.rehearse` does the work, and imports torch and vLLM when called.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from kimi_k3.cli.output import print_json, quiet_vllm
from kimi_k3.cli.plan import (
    DEFAULT_UTILIZATION,
    ExpertParallel,
    Gpu,
    Measured,
    Model,
    Rank,
    Sizes,
    TensorParallel,
    Utilization,
    refusals,
)

_ORDERS = ("index", "reverse", "shuffled")


def rehearse(
    model: Model,
    tp: TensorParallel = 8,
    rank: Rank = 0,
    expert_parallel: ExpertParallel = False,
    quantization: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Of linear layers while they load: bf16 for none, or a name of vLLM's.",
        ),
    ] = "fp8_per_channel_static",
    order: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="In which tensors come: index (as they lie in the files), reverse, or shuffled.",
        ),
    ] = "index",
    seed: Annotated[int, typer.Option(metavar="N", help="Of the shuffled order.")] = 0,
    world_hosts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Machines that the ranks are spread over.")
    ] = 1,
    without_overlay: Annotated[
        bool,
        typer.Option("--without-overlay", help="Leave the amendments out: what stock vLLM does."),
    ] = False,
    without_index: Annotated[
        bool,
        typer.Option(
            "--without-index",
            help="Search the expert mapping from its start for every tensor, as stock vLLM does.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the bytes held during the load: .png, .svg or .pdf. Needs matplotlib "
            "(extra `plot`).",
            show_default=False,
        ),
    ] = None,
    gpu: Gpu = None,
    utilization: Utilization = DEFAULT_UTILIZATION,
    measured: Measured = None,
    as_json: Sizes = False,
) -> None:
    """Rehearse how one rank loads a checkpoint: what it holds meanwhile, and afterwards.

    Builds vLLM's own model for ROCm without memory and hands it every tensor's header through the
    real loaders. No weight is read and no GPU is needed; Kimi-K3 takes a minute and 1 GiB.

    MODEL is a real checkpoint, or one of headers alone, which `kimi-k3 make-checkpoint MODEL
    --preset k3-shapes` writes.
    """
    if order not in _ORDERS:
        raise typer.BadParameter(f"order: expected one of {', '.join(_ORDERS)}, found {order!r}")
    if rank >= tp:
        raise typer.BadParameter(f"rank {rank} lies outside a layout of {tp}: 0 to {tp - 1}")
    if tp % world_hosts:
        raise typer.BadParameter(f"{tp} ranks do not divide by {world_hosts} hosts")
    from kimi_k3.cli.memory_tables import check_plot, print_load, print_plan
    from kimi_k3.cli.memory_tables import plot as draw
    from kimi_k3.rehearsal.components import gpu_memory
    from kimi_k3.rehearsal.config import read_config
    from kimi_k3.rehearsal.memory_plan import indivisible
    from kimi_k3.rehearsal.ranks import Layout

    with refusals(model):
        if plot:
            check_plot(plot)
        if gpu is not None:
            gpu_memory(gpu)
        config = read_config(model)
        problems = indivisible(config.get("text_config", config), tp)
    if problems:
        raise typer.BadParameter("; ".join(problems))
    import vllm_overlay

    # Before vLLM is imported: its plugins would lay the overlay over it, and it logs a great deal.
    if without_overlay:
        os.environ[vllm_overlay.SWITCH] = "0"
    quiet_vllm()
    vllm_overlay.activate(amendments=not without_overlay)
    from rich.console import Console

    from kimi_k3.rehearsal import rehearse as rehearsal
    from kimi_k3.rehearsal.stream import Order

    layout = Layout(tp, rank, expert_parallel, quantization, world_hosts)
    with refusals(model):
        with Console(stderr=True).status("streaming headers through the loaders"):
            found = rehearsal.rehearse(model, layout, Order(order), seed, indexed=not without_index)
        if plot:
            draw(found, plot)
    if as_json:
        print_json(found.as_dict())
        return
    title = f"Rank {rank} of {tp} after loading, {quantization} linear layers"
    print_plan(found.plan, title, gpu=gpu, utilization=utilization, measured=measured)
    print_load(found)
