# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The account of a load: which layers wait for what, and the sources that they hold meanwhile.

One per process and load, opened for Kimi-K3 or where the environment asks for it. Upstream's
functions do the loading; the account surrounds them and decides nothing, except to stop a load that
exceeds its budget.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import sources
from vllm.model_executor.model_loader.reload.budget import (
    BUDGET_VARIABLE,
    Budget,
    LoadBudgetError,
    budget_for,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.sources import HeldSources, Source
from vllm.model_executor.model_loader.reload.summary import (
    RECORD_VARIABLE,
    Delay,
    LoadSummary,
    Missing,
    Peak,
    Point,
    delayed,
    requested_folder,
    table,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel
from vllm_overlay import require

get_layerwise_info = require("vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info")
logger = init_logger(__name__)

# Kimi-K3, before its class is known and after it was built.
_ARCHITECTURES = ("KimiK3", "KimiLinear")
_MODELS = "vllm.models.kimi_k3."

_current: "LoadAccount | None" = None
_last: LoadSummary | None = None


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
        budget: Limit for held sources; None takes the environment's when the first source arrives.
        keep_history: Keep a `Point` for every source and completion; may be switched on later.
        warn_by_default: Without a budget, warn at a share of the free memory.

    Attributes:
        held: The sources held now.
        points: The history, if it is kept.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        keep_history: bool = False,
        warn_by_default: bool = False,
    ) -> None:
        self.held = HeldSources()
        self.points: list[Point] = []
        self.keep_history = keep_history
        self._budget = budget
        self._budget_known = budget is not None
        self._warn_by_default = warn_by_default
        self._warned = False
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
        self._names.update((layer, name) for name, layer in model.named_modules())

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
                self._budget = budget_for(tensor.device, default=self._warn_by_default)
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
        for source in record.sources:
            self.held.release(source)
        record.sources.clear()
        record.nbytes = 0
        self._mark("finalize" if record.late else "complete", layer)

    def delays(self) -> list[Delay]:
        """Return the layers that have sources and wait for more, in the order of their names."""
        waiting = self._delays_where(lambda record: not record.done and bool(record.arrived))
        # Attention layers lack nothing: they are left for the end by design.
        return sorted((d for d in waiting if d.missing), key=lambda delay: delay.layer)

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

    def _delays_where(self, chosen: Callable[[_Layer], bool]) -> list[Delay]:
        return [
            Delay(self.name(layer), record.nbytes, tuple(_missing(layer, record)))
            for layer, record in self._layers.items()
            if chosen(record)
        ]

    def _enforce(self, budget: Budget) -> None:
        held = self.held.host if budget.on_host else self.held.device
        stopped = budget.stops and held > budget.nbytes
        warning = held > budget.nbytes / (2 if budget.stops else 1) and not self._warned
        if not (stopped or warning):
            return
        holders = self._delays_where(lambda record: bool(record.sources))
        message = budget.message(held, len(holders), table(holders), stopped=stopped)
        if stopped:
            raise LoadBudgetError(message)
        self._warned = True
        logger.warning(message)

    def _peak_at(self, nbytes: int, owner: str) -> Peak:
        return Peak(nbytes, owner, self._sources, time.perf_counter() - self._began)

    def _mark(self, event: str, layer: nn.Module) -> None:
        if self.keep_history:
            seconds = time.perf_counter() - self._began
            held = (self.held.device, self.held.host)
            self.points.append(Point(seconds, event, self.name(layer), *held))


def _missing(layer: nn.Module, record: _Layer) -> Iterable[Missing]:
    for name, tensor in get_layer_tensors(layer).items():
        arrived, expected = record.arrived.get(name, 0), get_tensor_load_numel(tensor)
        if name not in SKIP_LOAD_TENSORS and arrived < expected:
            row = expected // tensor.shape[0] if tensor.dim() > 1 else 1
            by_rows = expected % row == arrived % row == 0
            yield Missing(name, arrived, expected, row if by_rows else 1)


def begin(account: LoadAccount | None = None, *, kimi_k3: bool = False) -> LoadAccount:
    """Open the account of a load that begins now; an unfinished one is dropped.

    Args:
        account: The account to keep; a new one with the environment's settings if None.
        kimi_k3: Let a new one warn without a budget.
    """
    global _current
    keep = requested_folder() is not None
    _current = account or LoadAccount(keep_history=keep, warn_by_default=kimi_k3)
    sources.under_way = _current.held
    return _current


def _begin_if_wanted(*, kimi_k3: bool) -> LoadAccount | None:
    """Open the account of a load of Kimi-K3, or of any model where the environment asks for one."""
    if kimi_k3 or os.environ.get(RECORD_VARIABLE) or os.environ.get(BUDGET_VARIABLE):
        return begin(kimi_k3=kimi_k3)
    _close()
    return None


def current() -> LoadAccount:
    """Return the account of the load under way, opening one if there is none."""
    return _current or begin()


def last() -> LoadSummary | None:
    """Return what the last load with an account came to in this process."""
    return _last


def _close() -> None:
    global _current
    _current = sources.under_way = None


def create_model(
    create: Callable[..., nn.Module],
    vllm_config: Any,
    model_config: Any,
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    """Run upstream's `BaseModelLoader.create_model` with an account of it, if one is wanted."""
    kimi_k3 = any(name.startswith(_ARCHITECTURES) for name in model_config.architectures or ())
    account = _begin_if_wanted(kimi_k3=kimi_k3)
    model = create(vllm_config, model_config, *args, **kwargs)
    if account is not None:
        account.name_layers(model)
    return model


def reload(initialize: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `initialize_layerwise_reload` with an account of it, if one is wanted."""
    account = _begin_if_wanted(kimi_k3=type(model).__module__.startswith(_MODELS))
    if account is not None:
        account.name_layers(model)
    return initialize(model, *args, **kwargs)


def counting_loader(
    make: Callable[..., Callable[..., Any]],
    layer: nn.Module,
    param_name: str,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return upstream's buffering loader with the account, if there is one, told about its calls.

    Args:
        make: Upstream's `make_online_process_loader`.
        layer: The layer whose loader is wrapped.
        param_name: Its parameter.
        *args, **kwargs: For `make`.
    """
    loader = make(layer, param_name, *args, **kwargs)
    if _current is None:
        return loader
    info = get_layerwise_info(layer)
    _current.wrapped(layer)

    # Upstream and models tell a buffering loader by this name, and unwrap it by `__wrapped__`.
    @wraps(loader, assigned=("__doc__", "__annotations__"))
    def online_process_loader(*args: Any, **kwargs: Any) -> Any:
        account = _current
        if account is None or not info.can_load():
            return loader(*args, **kwargs)
        account.wrapped(layer)
        # Where there are positional arguments, the first is the parameter.
        given = (*args[1:], *(value for name, value in kwargs.items() if name != "param"))
        account.arriving(layer, param_name, [v for v in given if isinstance(v, torch.Tensor)])
        before = info.load_numel
        result = loader(*args, **kwargs)
        account.arrived(layer, param_name, info.load_numel - before)
        return result

    return online_process_loader


def process_layer(process: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `_layerwise_process` and take the layer's sources off the account."""
    account = _current
    if account is None:
        return process(layer, *args, **kwargs)
    account.completing(layer)
    result = process(layer, *args, **kwargs)
    account.completed(layer)
    return result


def finalize(process: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Name the delayed layers, run upstream's finalization, and close the account."""
    global _last
    account = _current
    if account is None:
        return process(model, *args, **kwargs)
    if delays := account.finalizing(model):
        logger.warning(delayed(delays))
    result = process(model, *args, **kwargs)
    _last = account.summary()
    _close()
    if _last.wrapped:
        logger.info(_last.line())
        _write(_last)
    return result


def _write(summary: LoadSummary) -> None:
    try:
        if folder := requested_folder():
            logger.info("The account was written to %s", summary.write(folder))
    except (OSError, ValueError) as error:
        # The model is loaded; a record that cannot be written is no reason to lose it.
        logger.warning("The account could not be written: %s", error)


# Upstream's functions of `layerwise` -> what surrounds them.
SURROUNDED: dict[str, Callable[..., Any]] = {
    "make_online_process_loader": counting_loader,
    "_layerwise_process": process_layer,
    "initialize_layerwise_reload": reload,
    "finalize_layerwise_processing": finalize,
}
