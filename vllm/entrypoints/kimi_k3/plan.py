# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 plan`: one rank's memory by component, from config.json alone.

Parses and prints; `rehearsal.planned` does the arithmetic. Neither torch nor vLLM is imported.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(help="A checkpoint's folder.")]
TensorParallel = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")]
Rank = Annotated[int, typer.Option(min=0, help="Which rank.")]
ExpertParallel = Annotated[
    bool, typer.Option("--expert-parallel", help="Spread whole experts over the ranks.")
]
Gpu = Annotated[
    str | None,
    typer.Option(help="MI300X, MI308X, MI325X, MI355X, H200, or a number of GiB. Default: all."),
]
Utilization = Annotated[
    float, typer.Option(min=0.01, max=1, help="vLLM's --gpu-memory-utilization.")
]
Measured = Annotated[
    float | None,
    typer.Option(help="GiB that a running worker takes: names the part that is no weight."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
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
    quantization: Annotated[Linear, typer.Option(help="Of linear layers.")] = Linear.BF16,
    gpu: Gpu = None,
    utilization: Utilization = DEFAULT_UTILIZATION,
    measured: Measured = None,
    as_json: AsJson = False,
) -> None:
    """Say what one rank of a layout holds, by component, and what a GPU has left. From config.json.

    Exit code 1 when the weights do not fit on the GPU that was named.
    """
    from vllm.entrypoints.kimi_k3.rehearsal import planned
    from vllm.entrypoints.kimi_k3.rehearsal.config import read_config
    from vllm.entrypoints.kimi_k3.rehearsal.report import gpu_memory, print_plan

    try:
        config = read_config(model)
        ranks = planned.Ranks(tp, rank, expert_parallel, fp8=quantization is Linear.FP8)
        found = planned.plan(config, ranks)
        total = gpu_memory(gpu) if gpu is not None else None
    except KeyError as error:
        raise typer.BadParameter(
            f"{model}/config.json: expected a Kimi-K3, found no {error}"
        ) from error
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        from rich.console import Console

        title = f"Rank {rank} of {tp}, {quantization} linear layers"
        title += ", whole experts on each rank" if expert_parallel else ""
        print_plan(Console(), found, title, gpu=gpu, utilization=utilization, measured=measured)
    if total is not None and found.free(total, utilization) <= 0:
        raise typer.Exit(1)
