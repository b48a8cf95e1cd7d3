# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The memory that a machine has against what each rank will hold, by vLLM's own rules at start-up.

Judges records; imports neither torch nor vLLM.
"""

from collections.abc import Iterator
from math import floor

from kimi_k3.doctor.findings import Finding, Level
from kimi_k3.doctor.machine import Kind, Machine
from kimi_k3.units import size

AREA = "memory"
# vLLM refuses to start where less is free than it is to use; other programs come and go.
_MARGIN = 0.02
_MORE_RANKS = "Use more ranks (--tp) or larger GPUs"
_SMALLER = "Use a machine with more memory, or a smaller model"


def judge(
    machine: Machine, need: int, ranks: int, utilization: float, cache: int | None
) -> Iterator[Finding]:
    """Compare the bytes of each rank's weights with the memory it will find.

    Args:
        machine: Its memory.
        need: Bytes of one rank's weights.
        ranks: Tensor-parallel ranks.
        utilization: Share of memory that vLLM may use.
        cache: Bytes of KV cache that VLLM_CPU_KVCACHE_SPACE asks for, if it is set.
    """
    if not machine.memory:
        return
    if machine.kind is Kind.CPU:
        yield from _on_host(machine, need, ranks, utilization, cache)
        return
    if ranks > machine.gpus:
        yield Finding(
            AREA,
            "ranks",
            Level.WARNING,
            f"{ranks} ranks and {machine.gpus} GPUs here: the others need GPUs of other machines",
        )
    tightest = min(machine.memory[:ranks], key=lambda memory: memory.free)
    budget = int(tightest.total * utilization)
    short = _fits(need, budget, f"{utilization:.0%} of {size(tightest.total)}", _MORE_RANKS)
    if short is not None:
        yield short
        return
    yield from _free(tightest.name, need, tightest.total, tightest.free, utilization)


def _on_host(
    machine: Machine, need: int, ranks: int, utilization: float, cache: int | None
) -> Iterator[Finding]:
    host, weights = machine.memory[0], need * ranks
    if cache is not None:
        short = _fits(weights + cache * ranks, host.free, "what is free", _SMALLER)
        yield short or _ok(weights, host.free - weights - cache * ranks, "beside the KV cache")
        return
    short = _fits(
        weights, int(host.total * utilization), f"{utilization:.0%} of the memory", _SMALLER
    )
    if short is not None:
        yield short
        return
    yield from _free(host.name, weights, host.total, host.free, utilization)


def _fits(need: int, budget: int, what: str, advice: str) -> Finding | None:
    if need < budget:
        return None
    text = f"they take {size(need)}, more than {what}, {size(budget)}. {advice}"
    return Finding(AREA, "weights", Level.PROBLEM, text)


def _ok(need: int, left: float, what: str) -> Finding:
    return Finding(AREA, "weights", Level.OK, f"{size(need)}; {size(left)} left {what}")


def _free(name: str, need: int, total: int, free: int, utilization: float) -> Iterator[Finding]:
    asked = total * utilization
    if free >= asked:
        yield _ok(need, asked - need, "for KV cache and activations")
        return
    usable = usable_share(total, free)
    if total * usable <= need:
        text = f"{size(free)} free, and weights alone take {size(need)}. Stop what holds the rest"
        yield Finding(AREA, name, Level.PROBLEM, text)
        return
    text = (
        f"{size(free)} free is less than {utilization:.0%} of it ({size(asked)}), and vLLM "
        f"refuses to start then. Use --gpu-memory-utilization {usable:.2f}, or free memory"
    )
    yield Finding(AREA, name, Level.WARNING, text)
    yield _ok(need, total * usable - need, f"at {usable:.2f}")


def usable_share(total: int, free: int) -> float:
    """Return the largest share of memory that vLLM will start with, to two digits."""
    return max(0.0, floor((free / total - _MARGIN) * 100) / 100)
