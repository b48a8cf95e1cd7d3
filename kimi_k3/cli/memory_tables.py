# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Memory plans and rehearsals as tables for a terminal. Imports neither torch nor the engine."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from kimi_k3.cli.output import check_writable
from kimi_k3.rehearsal.components import GIB, GPUS, MemoryPlan, gpu_memory
from kimi_k3.units import Unit, size

if TYPE_CHECKING:
    from pathlib import Path

    from kimi_k3.rehearsal.rehearse import Rehearsal

_MERGED_KDA = "in_proj_qkvgfab"
_EVERY = 8


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def print_plan(
    plan: MemoryPlan,
    title: str,
    *,
    gpu: str | None,
    utilization: float,
    measured: float | None = None,
) -> None:
    """Print what a rank holds, what a running worker adds, and what a GPU has left.

    Args:
        plan: The plan.
        title: What it is a plan of.
        gpu: A GPU's name or memory in GiB; None shows all known ones.
        utilization: Share of a GPU's memory that vLLM may use.
        measured: GiB that a running worker was seen to take; the part that is no weight is named.
    """
    console = Console()
    unit = Unit(plan.worker)
    table = _table(title, "component", unit.name)
    for name, nbytes in plan.components.items():
        table.add_row(name, unit.format(nbytes))
    table.add_section()
    table.add_row("text weights", unit.format(plan.resident))
    absorbed = f"+{unit.format(plan.absorbed)}"
    table.add_row("MLA's absorbed projections, derived after loading", absorbed)
    vision = f"+{unit.format(plan.vision)}" if plan.vision else "not in checkpoint"
    table.add_row("vision tower", vision)
    if measured is not None:
        rest = measured * GIB - plan.worker
        what = "GPU context, collectives' buffers, workspaces, allocator"
        sign = "+" if rest >= 0 else ""
        table.add_row(f"{what}: the rest of {measured:.2f} GiB", f"{sign}{unit.format(rest)}")
    console.print(table)
    choices = [("experts follow the general size rule for ROCm", plan.rounding)]
    if plan.int4_scales:
        choices = [
            ("experts become int4: bf16 scales instead of e8m0", plan.int4_scales),
            ("  while one layer is being converted", plan.int4_transient),
            *choices,
        ]
    unit = Unit(max(nbytes for _, nbytes in choices))
    table = _table("If", "choice", unit.name)
    for choice, nbytes in choices:
        table.add_row(choice, f"+{unit.format(nbytes)}")
    console.print(table)
    kinds = {"MXFP4": 0, "int4": plan.int4_scales} if plan.int4_scales else {"int4": 0}
    kinds["rounded up"] = plan.rounding
    table = _table(
        f"Left for KV cache and activations at {utilization:.0%} of the memory (GiB)",
        "GPU",
        "memory",
        *kinds,
    )
    for name in [gpu] if gpu else GPUS:
        total = gpu_memory(name)
        free = plan.free(total, utilization)
        row = [free - more / GIB for more in kinds.values()]
        cells = [f"{value:.2f}" if value > 0 else "[red]does not fit[/]" for value in row]
        table.add_row(name, f"{total:.1f}", *cells)
    console.print(table)


def print_load(rehearsal: "Rehearsal") -> None:
    """Print what was held during a rehearsed load, and how long it took."""
    console = Console()
    account = rehearsal.account
    mode = "overlay" if rehearsal.overlay else "stock vLLM"
    held = rehearsal.held_after()
    merged = [(name, nbytes) for name, nbytes in held.items() if name.endswith(_MERGED_KDA)]
    if merged:
        unit = Unit(max(nbytes for _, nbytes in merged) or GIB)
        table = _table(
            f"Source tensors held on the device, {mode}", "after layer", "KDA layers", unit.name
        )
        last = len(merged)
        for count, (name, nbytes) in enumerate(merged, start=1):
            if count % _EVERY == 0 or count in (1, last):
                table.add_row(name, str(count), unit.format(nbytes, digits=4))
        console.print(table)
    line = account.line()
    console.print(line, highlight=False, soft_wrap=True)
    most = account.peak_between_calls
    shown = f"{most / GIB:.4f} GiB" if most > GIB / 100 else size(most)
    console.print(f"The most held between calls: {shown}.", highlight=False)
    for delay in account.delays[:3]:
        console.print(f"[red]delayed[/] {delay}", highlight=False, soft_wrap=True)
    if len(account.delays) > 3:
        console.print(f"[red]delayed[/] and {len(account.delays) - 3} more layers")
    per_host = rehearsal.layout.tensor_parallel_size // rehearsal.layout.hosts
    console.print(
        f"{rehearsal.tensors:,} tensors ({rehearsal.checkpoint_bytes / 1e9:,.3f} GB, read by each "
        f"of {per_host} ranks a host) streamed in {rehearsal.seconds:.1f} s "
        f"({rehearsal.cpu_seconds:.1f} s of CPU time), memory {size(rehearsal.peak_rss)}",
        highlight=False,
        soft_wrap=True,
    )


def check_plot(file: "Path") -> None:
    """Refuse a plot that could not be drawn or kept, before the work that it is to show.

    Raises:
        ValueError: matplotlib is not installed, cannot write this kind of file, or there is no
            folder for it.
    """
    check_writable(file)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib: pip install 'vllm-kimi-k3[plot]', or leave --plot out"
        ) from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(f"{file}: expected a name that ends in one of {', '.join(kinds)}")


def plot(rehearsal: "Rehearsal", file: "Path") -> None:
    """Draw held bytes over the sources of a load; see `check_plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    points = [p for p in rehearsal.account.history if p.event != "finalize"]
    axes.step(range(len(points)), [p.device / GIB for p in points], where="post", linewidth=1)
    peak = rehearsal.account.peak
    axes.axhline(peak.nbytes / GIB, linestyle=":", linewidth=1)
    axes.annotate(
        f"peak {peak.nbytes / GIB:.3f} GiB: {peak.owner}",
        (0, peak.nbytes / GIB),
        textcoords="offset points",
        xytext=(4, -12),
        fontsize=8,
    )
    layout = rehearsal.layout
    mode = "overlay" if rehearsal.overlay else "stock"
    axes.set_title(
        f"Source tensors held, {mode}, rank {layout.rank} of {layout.tensor_parallel_size}, "
        f"{layout.linear} linear layers"
    )
    axes.set_xlabel("sources arrived and layers completed")
    axes.set_ylabel("GiB on the device")
    axes.set_ylim(bottom=0)
    figure.savefig(file, dpi=150)
