# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 rehearse`: the load of a checkpoint of any size, on a laptop, from its headers.

Parses and prints; `rehearsal.run` does the work, and imports torch and vLLM when it is to be done.
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

import vllm_overlay
from kimi_k3.cli.output import quiet_vllm
from kimi_k3.cli.plan import (
    DEFAULT_UTILIZATION,
    AsJson,
    ExpertParallel,
    Gpu,
    Measured,
    Model,
    Rank,
    TensorParallel,
    Utilization,
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
    as_json: AsJson = False,
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
    from kimi_k3.rehearsal.config import read_config
    from kimi_k3.rehearsal.planned import indivisible
    from kimi_k3.rehearsal.report import (
        check_plot,
        gpu_memory,
        print_load,
        print_plan,
    )
    from kimi_k3.rehearsal.report import plot as draw

    try:
        if plot:
            check_plot(plot)
        if gpu is not None:
            gpu_memory(gpu)
        config = read_config(model)
        problems = indivisible(config.get("text_config", config), tp)
    except KeyError as error:
        raise _not_a_kimi_k3(model, error) from error
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if problems:
        raise typer.BadParameter("; ".join(problems))
    # Before vLLM is imported: its plugins would lay the overlay over it, and it logs a great deal.
    if without_overlay:
        os.environ[vllm_overlay.SWITCH] = "0"
    quiet_vllm()
    vllm_overlay.activate(amendments=not without_overlay)
    from rich.console import Console

    from kimi_k3.rehearsal.layout import Layout
    from kimi_k3.rehearsal.run import rehearse as run
    from kimi_k3.rehearsal.stream import Order

    layout = Layout(tp, rank, expert_parallel, quantization, world_hosts)
    progress = Console(stderr=True)
    try:
        with progress.status("streaming headers through the loaders"):
            found = run(model, layout, Order(order), seed, indexed=not without_index)
        if plot:
            draw(found, plot)
    except KeyError as error:
        raise _not_a_kimi_k3(model, error) from error
    except (OSError, ValueError) as error:
        raise typer.BadParameter(_in_one_line(error)) from error
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
        return
    title = f"Rank {rank} of {tp} after loading, {quantization} linear layers"
    print_plan(Console(), found.plan, title, gpu=gpu, utilization=utilization, measured=measured)
    print_load(Console(), found)


def _not_a_kimi_k3(model: Path, error: KeyError) -> typer.BadParameter:
    return typer.BadParameter(f"{model}/config.json: expected a Kimi-K3, found no {error}")


def _in_one_line(error: Exception) -> str:
    """Return what an error says; of pydantic's, what vLLM said, without the dump around it."""
    parts = getattr(error, "errors", None)
    if not callable(parts):
        return str(error)
    return "; ".join(part["msg"].removeprefix("Value error, ") for part in parts())
