# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The package needs torch alone: no engine, AITER or command line, no Triton until a GPU asks."""

import subprocess
import sys

from tests import ROOT

WORK = """
import sys
import mxfp4_int4 as package
import torch
weight, scale = torch.zeros(1, 16, 32).byte(), torch.full((1, 16, 2), 120).byte()
for layout in ("aiter", "pack_quantized", "plain"):
    package.convert_experts(weight, scale, layout=layout, collect_stats=True)
loaded = {name.partition(".")[0] for name in sys.modules}
others = {"vllm", "k3_checkpoint", "kimi_k3", "vllm_overlay", "aiter", "triton", "rich", "numba"}
print("LOADED", sorted(loaded & others))
"""


def test_importing_and_converting_loads_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", WORK], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout


def test_importing_the_package_imports_no_torch():
    """Nor does what a process needs that converts rows of bytes by compiled code."""
    code = (
        "import sys, mxfp4_int4, mxfp4_int4.native_library, mxfp4_int4.options, mxfp4_int4.rows\n"
        "assert mxfp4_int4.GROUP_SIZE == 32\n"
        "print('LOADED', sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))\n"
        "missing = [name for name in mxfp4_int4.__all__ if not hasattr(mxfp4_int4, name)]\n"
        "print('MISSING', missing, hasattr(mxfp4_int4, 'nothing'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "LOADED []\nMISSING [] False\n"


def test_imports_are_relative_or_of_torch_and_triton():
    allowed = {"torch", "triton", "collections", "concurrent", "contextlib", "dataclasses"}
    allowed |= {"ctypes", "functools", "importlib", "itertools", "logging", "os", "threading"}
    allowed |= {"typing"}
    for path in (ROOT / "mxfp4_int4").glob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and not words[1].startswith("."):
                assert words[1].partition(".")[0] in allowed, f"{path.name}: {line}"
