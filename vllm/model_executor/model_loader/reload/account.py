# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The account of one load: which layers wait for what, and the sources they hold meanwhile.

Told about every source and every completion by the amendment of `layerwise`; it decides nothing
about loading except to stop it when its budget is exceeded. Works for any model.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload.guard import (
    Budget,
    Holder,
    Holdings,
    LoadBudgetError,
    budget_for,
    half_message,
    stop_message,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.sources import HeldSources, Source
from vllm.model_executor.model_loader.reload.summary import Delay, LoadSummary, Missing, Peak, Point
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

logger = init_logger(__name__)


@dataclass
class _Layer:
    """One wrapped layer: elements arrived by parameter, the sources it holds, and its state."""

    arrived: dict[str, int] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    nbytes: int = 0
    done: bool = False
    late: bool = False


class LoadAccount:
    """Counts what one load holds.

    Args:
        budget: Limit for held sources; None takes the environment's or the default when the first
            source arrives.
        keep_history: Keep a `Point` for every source and completion.

    Attributes:
        held: The sources held now.
        points: The history, if it is kept.
        keep_history: May be switched on after the account was opened.
    """

    def __init__(self, budget: Budget | None = None, *, keep_history: bool = False) -> None:
        self.held = HeldSources()
        self.points: list[Point] = []
        self._budget = budget
        self._budget_known = budget is not None
        self._warned = False
        self.keep_history = keep_history
        self._layers: WeakKeyDictionary[nn.Module, _Layer] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._began = time.perf_counter()
        self._sources = 0
        self._peak = Peak()
        self._peak_host = Peak()
        self._peak_between = 0
        self._finalizing = False
        self._delays: list[Delay] = []

    def name_layers(self, model: nn.Module) -> None:
        """Learn the names of a model's layers, for messages."""
        for name, layer in model.named_modules():
            self._names[layer] = name

    def name(self, layer: nn.Module) -> str:
        """Return a layer's name in the model, or what it calls itself where that says more."""
        known = self._names.get(layer, "")
        own = getattr(layer, "prefix", "")
        if isinstance(own, str) and own.endswith(known):
            known = own
        return known or type(layer).__name__

    def wrapped(self, layer: nn.Module) -> None:
        """Note that a layer's loaders buffer from now on."""
        if layer not in self._layers:
            self._layers[layer] = _Layer()

    def arriving(self, layer: nn.Module, param_name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count the sources of one loader call, before it buffers them.

        Raises:
            LoadBudgetError: More is held than the budget allows.
            SourceReusedError: A source lies where a held one lay.
        """
        record = self._layers[layer]
        owner = f"{self.name(layer)}.{param_name}"
        for tensor in tensors:
            if not self._budget_known:
                self._budget = budget_for(tensor.device)
                self._budget_known = True
            record.sources.append(self.held.hold(owner, tensor))
            record.nbytes += tensor.nbytes
        self._sources += 1
        if self.held.device > self._peak.nbytes:
            self._peak = self._peak_at(self.held.device, owner)
        if self.held.host > self._peak_host.nbytes:
            self._peak_host = self._peak_at(self.held.host, owner)
        self._mark("source", layer)
        if self._budget is not None:
            self._enforce(self._budget)

    def arrived(self, layer: nn.Module, param_name: str, elements: int) -> None:
        """Note that a loader call is over and how many elements it brought.

        A layer that the call completed has let go of its sources already.
        """
        record = self._layers[layer]
        if not record.done:
            record.arrived[param_name] = record.arrived.get(param_name, 0) + elements
        self._peak_between = max(self._peak_between, self.held.device)

    def completing(self, layer: nn.Module) -> None:
        """Make sure that a layer's sources are what arrived, just before they are loaded.

        Raises:
            SourceReusedError: One was overwritten while it was held.
        """
        for source in self._layers[layer].sources if layer in self._layers else ():
            # To look into a GPU's memory would make each layer wait for all work queued before it.
            self.held.check_unchanged(source, wait=False)

    def completed(self, layer: nn.Module) -> None:
        """Note that a layer was loaded and processed, and holds nothing any more."""
        record = self._layers.get(layer)
        if record is None:
            return
        record.done, record.late = True, self._finalizing
        self._release(record)
        self._mark("finalize" if record.late else "complete", layer)

    def delays(self) -> list[Delay]:
        """Return the layers that have sources and wait for more, in the order of their names."""
        found = []
        for layer, record in self._layers.items():
            if record.done or not record.arrived:
                continue
            # Attention layers lack nothing: they are left for the end by design.
            if missing := self._missing(layer, record):
                found.append(Delay(self.name(layer), record.nbytes, missing))
        return sorted(found, key=lambda delay: delay.layer)

    def holdings(self) -> Holdings:
        """Return who holds what now."""
        holders = [
            Holder(
                self.name(layer),
                record.nbytes,
                ", ".join(str(m) for m in self._missing(layer, record)) or "its last shard",
            )
            for layer, record in self._layers.items()
            if record.sources
        ]
        holders.sort(key=lambda holder: -holder.nbytes)
        return Holdings(self.held.device, self.held.host, tuple(holders))

    def finalizing(self, model: nn.Module) -> list[Delay]:
        """Return the layers that the whole checkpoint did not complete, before finalization."""
        self.name_layers(model)
        self._finalizing = True
        self._delays = self.delays()
        return self._delays

    def summary(self) -> LoadSummary:
        """Return what the load came to."""
        records = list(self._layers.values())
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return LoadSummary(
            rank=rank,
            wrapped=len(records),
            completed_early=sum(record.done and not record.late for record in records),
            delays=tuple(self._delays),
            sources=self._sources,
            peak=self._peak,
            peak_between_calls=self._peak_between,
            peak_host=self._peak_host,
            seconds=time.perf_counter() - self._began,
            history=tuple(self.points),
        )

    def _missing(self, layer: nn.Module, record: _Layer) -> tuple[Missing, ...]:
        found = []
        for name, tensor in get_layer_tensors(layer).items():
            if name in SKIP_LOAD_TENSORS:
                continue
            arrived, expected = record.arrived.get(name, 0), get_tensor_load_numel(tensor)
            if arrived < expected:
                row = expected // tensor.shape[0] if tensor.dim() > 1 else 1
                by_rows = expected % row == arrived % row == 0
                found.append(Missing(name, arrived, expected, row if by_rows else 1))
        return tuple(found)

    def _enforce(self, budget: Budget) -> None:
        held = self.held.host if budget.on_host else self.held.device
        if held > budget.nbytes:
            raise LoadBudgetError(stop_message(budget, self.holdings()))
        if held > budget.nbytes / 2 and not self._warned:
            self._warned = True
            logger.warning(half_message(budget, self.holdings()))

    def _peak_at(self, nbytes: int, owner: str) -> Peak:
        return Peak(nbytes, owner, self._sources, time.perf_counter() - self._began)

    def _mark(self, event: str, layer: nn.Module) -> None:
        if self.keep_history:
            self.points.append(
                Point(
                    time.perf_counter() - self._began,
                    event,
                    self.name(layer),
                    self.held.device,
                    self.held.host,
                )
            )

    def _release(self, record: _Layer) -> None:
        for source in record.sources:
            self.held.release(source)
        record.sources.clear()
        record.nbytes = 0
