# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How many bytes of sources a load may hold back before it warns or stops."""

import os
from dataclasses import dataclass

import torch

from vllm.model_executor.model_loader.reload.summary import GIB

# Environment variable: GiB of held sources at which a rank stops loading; 0 sets no limit.
BUDGET_VARIABLE = "VLLM_KIMI_K3_LOAD_BUDGET_GIB"
# Share of the memory that is free when the first source is held. A load in order holds the sources
# of one or two layers; one that holds half of what is left has layers that never complete.
DEFAULT_SHARE = 0.5


class LoadBudgetError(RuntimeError):
    """Held sources exceed the budget. The message lists who holds them."""


@dataclass(frozen=True)
class Budget:
    """Limit for held sources on one rank.

    Attributes:
        nbytes: The limit.
        on_host: Whether it limits host memory, as on the CPU platform, or a device's.
        origin: Where the limit comes from, for messages.
        stops: Whether loading stops at the limit, and warns at half of it; otherwise it warns only.
    """

    nbytes: int
    on_host: bool
    origin: str
    stops: bool = True

    def message(self, held: int, holders: int, table: str, *, stopped: bool) -> str:
        """Return the text of the warning, or of the exception with which loading stops.

        Args:
            held: Bytes held where the limit applies.
            holders: Layers that hold them.
            table: The largest of these, a line each.
            stopped: Whether loading stops.
        """
        where = "in host memory" if self.on_host else "on the device"
        what = f"{held / GIB:.2f} GiB of source tensors are held {where} for {holders} layers that "
        what += "are not complete"
        limit = f"{self.nbytes / GIB:.2f} GiB ({self.origin}). The largest:\n{table}"
        if not stopped:
            return f"{what}; {'loading stops at' if self.stops else 'expected at most'} {limit}"
        return (
            f"loading stopped: {what}, expected at most {limit}\n"
            "A layer that has all its shards and still waits has elements that are in no "
            f"checkpoint. Set {BUDGET_VARIABLE} to a larger number of GiB, or to 0 to load without "
            "a limit."
        )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, torch's own cache included.

    None where that has no meaning (meta).
    """
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    if device.type == "meta":
        return None
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return torch.accelerator.get_memory_info(device)[0] + cached


def budget_for(device: torch.device, *, default: bool = True) -> Budget | None:
    """Return the limit for sources on `device`: the environment's, or a share of its free memory.

    Args:
        device: Where the first source lies.
        default: Without a limit from the environment, warn at a share of the free memory.

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
    free = free_memory(device) if default else None
    if free is None:
        return None
    origin = f"{DEFAULT_SHARE:.0%} of the {free / GIB:.1f} GiB that were free at the first source"
    return Budget(int(free * DEFAULT_SHARE), on_host, origin, stops=False)
