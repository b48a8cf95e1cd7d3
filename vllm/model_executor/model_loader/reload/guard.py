# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How many bytes of sources a load may hold back, and what stopping says.

Decides limits and writes messages; it counts nothing itself.
"""

import os
from dataclasses import dataclass

import torch

GIB = 2**30
# Environment variable: GiB of held sources at which a rank stops loading; 0 sets no limit.
BUDGET_VARIABLE = "VLLM_KIMI_K3_LOAD_BUDGET_GIB"
# Share of the memory that is free when the first source is held. A load in order holds the sources
# of one or two layers; one that holds half of what is left has layers that never complete.
DEFAULT_SHARE = 0.5
_SHOWN = 10


class LoadBudgetError(RuntimeError):
    """Held sources exceed the budget. The message lists who holds them."""


@dataclass(frozen=True)
class Budget:
    """Limit for held sources on one rank.

    Attributes:
        nbytes: The limit; loading warns at half of it.
        on_host: Whether it limits host memory, as on the CPU platform, or a device's.
        origin: Where the limit comes from, for messages.
    """

    nbytes: int
    on_host: bool
    origin: str


@dataclass(frozen=True)
class Holder:
    """One layer that holds sources.

    Attributes:
        layer: Its name.
        nbytes: Bytes of its sources, device and host together, as the tensors' sizes add up.
        waits_for: What is missing for its completion.
    """

    layer: str
    nbytes: int
    waits_for: str


@dataclass(frozen=True)
class Holdings:
    """Who holds what at one moment; feeds the warning, the exception and the JSON record.

    Attributes:
        device: Bytes held on the device, each storage once.
        host: Bytes held in host memory.
        holders: Layers with held sources, the largest first.
    """

    device: int
    host: int
    holders: tuple[Holder, ...]

    def table(self) -> str:
        """Return the largest holders as lines of text."""
        shown = self.holders[:_SHOWN]
        width = max((len(holder.layer) for holder in shown), default=0)
        lines = [
            f"  {holder.nbytes / GIB:8.3f} GiB  {holder.layer:<{width}}  {holder.waits_for}"
            for holder in shown
        ]
        rest = self.holders[_SHOWN:]
        if rest:
            nbytes = sum(holder.nbytes for holder in rest)
            lines.append(f"  {nbytes / GIB:8.3f} GiB  in {len(rest)} more layers")
        return "\n".join(lines)


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None where that has no meaning (meta)."""
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    if device.type == "meta":
        return None
    return torch.accelerator.get_memory_info(device)[0]


def budget_for(device: torch.device) -> Budget | None:
    """Return the limit for sources on `device`: the environment's, or a share of its free memory.

    Args:
        device: Where the first source lies.

    Raises:
        ValueError: The environment variable holds no number of GiB.
    """
    on_host = device.type == "cpu"
    text = os.environ.get(BUDGET_VARIABLE)
    if text:
        try:
            limit = float(text)
        except ValueError:
            limit = -1
        if not 0 <= limit < 2**40:
            raise ValueError(
                f"{BUDGET_VARIABLE}: expected a number of GiB, 0 for no limit, found {text!r}"
            )
        return Budget(int(limit * GIB), on_host, BUDGET_VARIABLE) if limit else None
    free = free_memory(device)
    if free is None:
        return None
    origin = f"{DEFAULT_SHARE:.0%} of the {free / GIB:.1f} GiB that were free at the first source"
    return Budget(int(free * DEFAULT_SHARE), on_host, origin)


def _where(budget: Budget) -> str:
    return "in host memory" if budget.on_host else "on the device"


def half_message(budget: Budget, holdings: Holdings) -> str:
    """Return the warning at half of the budget."""
    held = holdings.host if budget.on_host else holdings.device
    return (
        f"{held / GIB:.2f} GiB of source tensors are held {_where(budget)} for "
        f"{len(holdings.holders)} layers that are not complete; loading stops at "
        f"{budget.nbytes / GIB:.2f} GiB ({budget.origin}). The largest:\n{holdings.table()}"
    )


def stop_message(budget: Budget, holdings: Holdings) -> str:
    """Return the message with which loading stops."""
    held = holdings.host if budget.on_host else holdings.device
    return (
        f"loading stopped: {held / GIB:.2f} GiB of source tensors are held {_where(budget)} for "
        f"{len(holdings.holders)} layers that are not complete, expected at most "
        f"{budget.nbytes / GIB:.2f} GiB ({budget.origin}). The largest:\n{holdings.table()}\n"
        "A layer that has all its shards and still waits has elements that are in no checkpoint. "
        f"Set {BUDGET_VARIABLE} to a larger number of GiB, or to 0 to load without a limit."
    )
