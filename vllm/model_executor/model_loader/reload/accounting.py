# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Keeps the account of the load that is under way in this process, from begin to its log line.

What the amendments of `layerwise`, `base_loader` and `models.utils` call. Upstream's functions do
the loading; here they are only surrounded.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload.account import LoadAccount
from vllm.model_executor.model_loader.reload.sources import sources_in
from vllm.model_executor.model_loader.reload.summary import (
    Delay,
    LoadSummary,
    prepare_folder,
    requested_folder,
)
from vllm_overlay import require

get_layerwise_info = require("vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info")
logger = init_logger(__name__)

_current: LoadAccount | None = None
_last: LoadSummary | None = None
_SHOWN = 10


def begin(account: LoadAccount | None = None) -> LoadAccount:
    """Open the account of a load that begins now; an unfinished one is dropped.

    Args:
        account: The account to keep; a new one with the environment's settings if None.
    """
    global _current
    folder = requested_folder()
    if folder is not None:
        prepare_folder(folder)
    _current = account or LoadAccount(keep_history=folder is not None)
    return _current


def current() -> LoadAccount:
    """Return the account of the load under way, opening one if there is none."""
    return _current or begin()


def last() -> LoadSummary | None:
    """Return what the last load in this process came to."""
    return _last


def counting_loader(make: Callable[..., Callable], layer: nn.Module, param_name: str) -> Callable:
    """Return upstream's buffering loader with the account told about each of its calls.

    Args:
        make: Upstream's `make_online_process_loader`.
        layer: The layer whose loader is wrapped.
        param_name: Its parameter.
    """
    loader = make(layer, param_name)
    info = get_layerwise_info(layer)
    current().wrapped(layer)

    # Upstream and models tell a buffering loader by this name, and unwrap it by `__wrapped__`.
    @wraps(loader, assigned=("__doc__", "__annotations__"))
    def online_process_loader(*args: Any, **kwargs: Any) -> Any:
        if not info.can_load():
            return loader(*args, **kwargs)
        account = current()
        account.wrapped(layer)
        account.arriving(layer, param_name, sources_in(args, kwargs))
        before = info.load_numel
        result = loader(*args, **kwargs)
        account.arrived(layer, param_name, info.load_numel - before)
        return result

    return online_process_loader


def process_layer(process: Callable[..., None], layer: nn.Module, info: Any) -> None:
    """Run upstream's `_layerwise_process` and take the layer's sources off the account."""
    account = current()
    account.completing(layer)
    process(layer, info)
    account.completed(layer)


def finalize(process: Callable[..., None], model: nn.Module, model_config: Any) -> None:
    """Name the delayed layers, run upstream's finalization, and close the account."""
    global _current, _last
    account = current()
    delays = account.finalizing(model)
    if delays:
        logger.warning(_delayed(delays))
    process(model, model_config)
    _last, _current = account.summary(), None
    if _last.wrapped:
        logger.info(_last.line())
        if folder := requested_folder():
            try:
                logger.info("The account was written to %s", _last.write(folder))
            except OSError as error:
                # The model is loaded; a record that cannot be written is no reason to lose it.
                logger.warning("The account could not be written to %s: %s", folder, error)


def watch(weights: Iterable[Any]) -> Iterator[Any]:
    """Hand on checkpoint tensors, refusing one that has overwritten a held one.

    Raises:
        SourceReusedError: The weights come from an iterator that reuses its buffers.
    """
    for item in weights:
        held = _current.held if _current is not None else None
        if held:
            held.check_newcomer(item[0], item[1])
        yield item
        del item


def _delayed(delays: list[Delay]) -> str:
    lines = [f"{len(delays)} layers were not completed by the whole checkpoint:"]
    lines += [f"  {delay}" for delay in delays[:_SHOWN]]
    if len(delays) > _SHOWN:
        lines.append(f"  and {len(delays) - _SHOWN} more")
    return "\n".join(lines)
