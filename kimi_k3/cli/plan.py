# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 plan`: one rank's memory by component, from config.json alone.

Parses and prints; `rehearsal.memory_plan` does the arithmetic. Neither torch nor vLLM is imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kimi_k3.cli.output import finite, print_json

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A checkpoint's folder; config.json and shards are in it."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel ranks in all."),
]
Rank = Annotated[int, typer.Option(min=0, metavar="N", help="Which of the ranks, counted from 0.")]
ExpertParallel = Annotated[
    bool,
    typer.Option(
        "--expert-parallel",
        help="Spread whole experts over the ranks instead of slices of each "
        "(vLLM's --enable-expert-parallel).",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="GPU",
        help="MI300X, MI308X, MI325X, MI355X, H200, or a GPU's memory in GiB, such as 64. "
        "Without it: all of these.",
        show_default=False,
    ),
]
Utilization = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1,
        callback=finite,
        metavar="SHARE",
        help="Share of a GPU's memory that vLLM may use (its --gpu-memory-utilization).",
    ),
]
Measured = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=finite,
        metavar="GIB",
        help="GiB that a running worker was seen to take; the table then names the part that is "
        "no weight.",
        show_default=False,
    ),
]
Sizes = Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes, no tables.")]
DEFAULT_UTILIZATION = 0.92


class Linear(StrEnum):
    """How linear layers are kept."""

    BF16 = "bf16"
    FP8 = "fp8_per_channel_static"


def plan(
    model: Model,
    tp: TensorParallel = 8,
    rank: Rank = 0,
    expert_parallel: ExpertParallel = False,
    quantization: Annotated[
        Linear,
        typer.Option(metavar="KIND", help="Of linear layers: bf16 or fp8_per_channel_static."),
    ] = Linear.BF16,
    gpu: Gpu = None,
    utilization: Utilization = DEFAULT_UTILIZATION,
    measured: Measured = None,
    as_json: Sizes = False,
) -> None:
    """Say how much memory one rank will hold, by component, and what a GPU has left beside it.

    Reads config.json alone and answers at once. `rehearse` finds the same by building the model.

    Exit code 1: the weights do not fit on the GPU that was named. 2: wrong usage.
    """
    from kimi_k3.rehearsal import memory_plan
    from kimi_k3.rehearsal.components import gpu_memory
    from kimi_k3.rehearsal.config import read_config
    from kimi_k3.rehearsal.ranks import Layout

    with refusals(model):
        layout = Layout(tp, rank, expert_parallel, quantization.value)
        found = memory_plan.plan(read_config(model), layout)
        total = gpu_memory(gpu) if gpu is not None else None
    if as_json:
        print_json(found.as_dict())
    else:
        from kimi_k3.cli.memory_tables import print_plan

        title = f"Rank {rank} of {tp}, {quantization} linear layers"
        title += ", whole experts on each rank" if expert_parallel else ""
        print_plan(found, title, gpu=gpu, utilization=utilization, measured=measured)
    if total is not None and found.free(total, utilization) <= 0:
        raise typer.Exit(1)


@contextmanager
def refusals(model: Path) -> Iterator[None]:
    """Turn what a model or layout is refused for into a message about wrong usage.

    Raises:
        BadParameter: In place of KeyError, OSError and ValueError.
    """
    try:
        yield
    except KeyError as error:
        raise typer.BadParameter(
            f"{model}/config.json: expected a Kimi-K3, found no {error}"
        ) from error
    except (OSError, ValueError) as error:
        # pydantic tells what vLLM said amid a dump of all that it looked at.
        parts: list[dict[str, str]] = getattr(error, "errors", list)()
        said = "; ".join(part["msg"].removeprefix("Value error, ") for part in parts)
        raise typer.BadParameter(said or str(error)) from error
