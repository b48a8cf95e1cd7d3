# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Memory against the plan by vLLM's own rules at start-up, for machines that are not here."""

import pytest

from kimi_k3.doctor.findings import Level
from kimi_k3.doctor.machine import Kind, Machine, Memory
from kimi_k3.doctor.memory import judge, usable_share

GIB = 2**30
WORKER = int(192.51 * GIB)


def gpus(total: float, *free: float) -> Machine:
    memory = (Memory(f"GPU {n}", int(total * GIB), int(f * GIB)) for n, f in enumerate(free))
    return Machine(Kind.ROCM, "RocmPlatform", "gfx942", tuple(memory))


def host(total: float, free: float) -> Machine:
    return Machine(
        Kind.CPU, "CpuPlatform", memory=(Memory("RAM", int(total * GIB), int(free * GIB)),)
    )


def levels(*arguments, cache=None) -> list[tuple[str, Level]]:
    return [(row.subject, row.level) for row in judge(*arguments, cache)]


@pytest.mark.parametrize(
    ("machine", "ranks", "expected"),
    [
        (gpus(256, *[250] * 8), 8, [("weights", Level.OK)]),
        (gpus(192, *[190] * 8), 8, [("weights", Level.PROBLEM)]),
        (gpus(256, *[250] * 8), 16, [("ranks", Level.WARNING), ("weights", Level.OK)]),
        # One GPU that another program uses decides for all.
        (gpus(256, 250, 230), 2, [("GPU 1", Level.WARNING), ("weights", Level.OK)]),
        (gpus(256, 250, 190), 2, [("GPU 1", Level.PROBLEM)]),
        # GPUs that no rank uses do not count.
        (gpus(256, 250, 10), 1, [("weights", Level.OK)]),
    ],
)
def test_gpus(machine, ranks, expected):
    assert levels(machine, WORKER, ranks, 0.92) == expected


@pytest.mark.parametrize(
    ("machine", "ranks", "cache", "expected"),
    [
        (host(64, 62), 1, None, [("weights", Level.OK)]),
        (host(64, 40), 1, None, [("RAM", Level.WARNING), ("weights", Level.OK)]),
        (host(64, 40), 4, None, [("RAM", Level.PROBLEM)]),
        (host(64, 62), 8, None, [("weights", Level.PROBLEM)]),
        (host(64, 40), 1, 4 * GIB, [("weights", Level.OK)]),
        (host(64, 40), 2, 15 * GIB, [("weights", Level.PROBLEM)]),
    ],
)
def test_host(machine, ranks, cache, expected):
    assert levels(machine, 10 * GIB, ranks, 0.92, cache=cache) == expected


def test_the_advice_is_a_share_that_vllm_starts_with():
    machine = host(20, 17)
    row = next(iter(judge(machine, GIB, 1, 0.92, None)))
    share = usable_share(20 * GIB, 17 * GIB)
    assert f"--gpu-memory-utilization {share:.2f}" in row.text
    assert share == 0.83
    assert 20 * share < 17
    assert usable_share(20 * GIB, 0) == 0.0
