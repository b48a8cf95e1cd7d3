# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The rehearsal: the real loaders, fed with a checkpoint's headers, watched by the load account.

Prints nothing and keeps no tensor. With the overlay's amendments or without them: the account is
put around stock vLLM too.
"""

import gc
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vllm_overlay
from kimi_k3.rehearsal.components import CHUNK_EXPERTS, EXPERTS, SCALES, MemoryPlan, summed
from kimi_k3.rehearsal.rank_model import kda_layers, rank_model
from kimi_k3.rehearsal.ranks import Layout
from kimi_k3.rehearsal.replaced import replaced
from kimi_k3.rehearsal.stream import Header, Order, headers, tensors
from vllm.model_executor.model_loader.expert_index import IndexedMapping
from vllm.model_executor.model_loader.reload import accounting
from vllm.model_executor.model_loader.reload.summary import LoadSummary

layerwise = import_module("vllm.model_executor.model_loader.reload.layerwise")
_FULL_PREFIX = "language_model."


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsed load came to.

    Attributes:
        layout: Which rank of which layout.
        overlay: Whether the overlay's amendments were in force.
        plan: Memory after the load, by component.
        account: What was held during the load, with its history.
        tensors: Text tensors that were streamed.
        checkpoint_bytes: Their bytes.
        seconds: Wall time of streaming all tensors through the loaders, headers already read.
        cpu_seconds: CPU time of the same.
        peak_rss: The most memory that this process has used so far, bytes.
    """

    layout: Layout
    overlay: bool
    plan: MemoryPlan
    account: LoadSummary
    tensors: int
    checkpoint_bytes: int
    seconds: float
    cpu_seconds: float
    peak_rss: int

    def held_after(self) -> dict[str, int]:
        """Return layer -> bytes held after its last source, in the order of these."""
        last: dict[str, int] = {}
        for point in self.account.history:
            if point.event == "finalize":
                break
            last.pop(point.layer, None)
            last[point.layer] = point.device
        return last

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            **asdict(self),
            "plan": self.plan.as_dict(),
            "held_after": self.held_after(),
        }


def rehearse(
    folder: Path,
    layout: Layout,
    order: Order = Order.INDEX,
    seed: int = 0,
    *,
    indexed: bool = True,
) -> Rehearsal:
    """Load a checkpoint's headers into one rank's real model, and say what it took.

    Args:
        folder: config.json and shards, of which only the headers are read.
        layout: The rank and its layout.
        order: In which order tensors come.
        seed: For the shuffled order.
        indexed: False scans the expert mapping for every tensor, as stock vLLM does.

    Raises:
        FileNotFoundError: The folder lacks shards.
        ValueError: A shard or the layout is refused.
    """
    kda = kda_layers(folder)
    with _account(), rank_model(folder, layout) as (model, config):
        load_weights: Any = model.load_weights
        account = accounting.current()
        account.name_layers(model)
        account.keep_history = True
        counted = _Counted(headers(folder, order, seed))
        with _without_gc(), ExitStack() as stack:
            if not indexed:
                stack.enter_context(replaced(IndexedMapping, "__iter__", list.__iter__))
            found = list(counted)  # files first, so that the time is the loaders' alone
            wall, cpu = time.perf_counter(), time.process_time()
            load_weights(tensors(iter(found)))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        layerwise.finalize_layerwise_processing(model, config.model_config)
        summary = accounting.last()
        plan = _plan(model, kda, counted.vision)
    if summary is None:
        raise RuntimeError("the load ended without an account")
    plan = _with_rounding(plan, folder, layout, kda)
    return Rehearsal(
        layout=layout,
        overlay=vllm_overlay.is_active(),
        plan=plan,
        account=summary,
        tensors=counted.text,
        checkpoint_bytes=counted.nbytes,
        seconds=wall,
        cpu_seconds=cpu,
        peak_rss=peak_rss(),
    )


def resident(folder: Path, layout: Layout) -> MemoryPlan:
    """Build one rank's model and say what its parameters take; linear layers as they are built.

    Streams nothing, so the layers that are quantized while they load are not.
    """
    kda = kda_layers(folder)
    with rank_model(folder, layout) as (model, _):
        plan = _plan(model, kda, 0)
    return _with_rounding(plan, folder, layout, kda)


def peak_rss() -> int:
    """Return the most memory that this process has used, in bytes."""
    # Not ru_maxrss where there is better: a process begins with that of the one which started it.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Counted:
    """Text headers with the names of a text model, counted; the vision tower's only summed."""

    def __init__(self, found: Iterator[Header]) -> None:
        self._found = found
        self.text = self.nbytes = self.vision = 0

    def __iter__(self) -> Iterator[Header]:
        for name, dtype, shape in self._found:
            nbytes = dtype.itemsize * prod(shape)
            if name.startswith(("vision_tower.", "mm_projector.")):
                self.vision += nbytes
                continue
            self.text += 1
            self.nbytes += nbytes
            yield name.removeprefix(_FULL_PREFIX), dtype, shape


@contextmanager
def _without_gc() -> Iterator[None]:
    """Half a million short-lived tensors are freed by their reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _account() -> Iterator[None]:
    """Put the account around stock vLLM's functions where no amendment has."""
    with ExitStack() as stack:
        accounting.begin()
        if not vllm_overlay.is_active():
            for name, wrapper in (
                ("make_online_process_loader", accounting.counting_loader),
                ("_layerwise_process", accounting.process_layer),
                ("finalize_layerwise_processing", accounting.finalize),
            ):
                wrapped = partial(wrapper, getattr(layerwise, name))
                stack.enter_context(replaced(layerwise, name, wrapped))
        yield


def _plan(model: nn.Module, kda: frozenset[int], vision: int) -> MemoryPlan:
    parameters = dict(model.named_parameters())

    def ending(name: str) -> list[torch.Tensor]:
        return [p for full, p in parameters.items() if full.endswith(name)]

    weights, scales = (
        [p for part in ("w13", "w2") for p in ending(f"routed_experts.{part}_weight{kind}")]
        for kind in ("", "_scale")
    )
    bf16 = torch.bfloat16.itemsize
    transients = (
        scale.numel() * bf16 + weight[:CHUNK_EXPERTS].nbytes
        for scale, weight in zip(scales, weights, strict=True)
    )
    return MemoryPlan(
        components=_components(model, kda),
        rounding=0,
        int4_scales=sum(scale.numel() * bf16 - scale.nbytes for scale in scales),
        int4_transient=max(transients, default=0),
        absorbed=sum(p.numel() * bf16 for p in ending("kv_b_proj.weight")),
        vision=vision,
    )


def _components(model: nn.Module, kda: frozenset[int]) -> dict[str, int]:
    return summed(((name, p.nbytes) for name, p in model.named_parameters()), kda)


def _with_rounding(
    plan: MemoryPlan, folder: Path, layout: Layout, kda: frozenset[int]
) -> MemoryPlan:
    """Add what the general size rule would cost, by building the model once more under it."""
    with rank_model(folder, replace(layout, rounded=True)) as (model, _):
        rounded = _components(model, kda)
    more = sum(rounded[name] - plan.components[name] for name in (EXPERTS, SCALES))
    return replace(plan, rounding=more)
