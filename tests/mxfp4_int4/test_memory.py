# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Memory of a conversion in place on a CPU, measured in a process of its own: the highest resident
size, which the kernel keeps, against what was resident before."""

import os
import subprocess
import sys

import pytest

from mxfp4_int4 import native_library

MEASURE = """
import sys, threading
import mxfp4_int4 as package
import torch
torch.set_num_threads(2)
def read(name):
    line = next(x for x in open("/proc/self/status") if x.startswith(name))
    return int(line.split()[1]) * 1024
e, n, k, in_place, stats = (int(x) for x in sys.argv[1:])
few = torch.zeros(8, 512, 512).byte(), torch.full((8, 512, 32), 120).byte()
package.convert_experts(*few, layout="aiter", collect_stats=bool(stats))  # tables, thread stacks
weight = torch.full((e, n, k // 2), 0x5A, dtype=torch.uint8)
scale = torch.full((e, n, k // 32), 120, dtype=torch.uint8)
open("/proc/self/clear_refs", "w").write("5")  # forget the highest resident size so far
before = read("VmRSS")
out = package.convert_experts(
    weight, scale, layout="aiter", in_place=bool(in_place), collect_stats=bool(stats))
assert out.weight.data_ptr() == weight.data_ptr()
print("EXTRA", read("VmHWM") - before - 2 * out.scale.numel(), "OF", weight.numel())
"""


@pytest.fixture(params=["0", "1"], ids=["lookup", "native"])
def environment(request) -> dict[str, str]:
    if request.param == "1" and native_library.library() is None:
        pytest.skip("this installation has no compiled code")
    return {native_library.VARIABLE: request.param}


def extra_bytes(
    environment: dict[str, str], e: int, n: int, k: int, stats: bool = False
) -> tuple[int, int]:
    """Peak bytes beyond the new scales, and packed bytes converted."""
    command = [sys.executable, "-c", MEASURE, *map(str, (e, n, k, 1, int(stats)))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | environment
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its highest resident size")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    print(f"\n{int(words[1]) / 2**20:.1f} MiB beyond the scales, of {int(words[3]) / 2**20:.0f}")
    return int(words[1]), int(words[3])


@pytest.mark.parametrize("stats", [False, True])
def test_extra_memory_in_place(stats, environment):
    # 96 MiB of packed experts (24 with statistics); a chunk of 8 K3 experts at TP8 is 10.5 MiB.
    extra, _ = extra_bytes(environment, 16 if stats else 64, 1024, 3072, stats)
    assert extra < 64 << 20


@pytest.mark.slow
def test_a_gibibyte_in_place(environment):
    extra, packed = extra_bytes(environment, 128, 2048, 8192)
    assert packed == 1 << 30
    assert extra < (8 << 20 if environment[native_library.VARIABLE] == "1" else 64 << 20)
