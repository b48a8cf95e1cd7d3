# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The package needs torch alone: no engine, AITER or command line, no Triton until a GPU asks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
NAME = "vllm.model_executor.layers.quantization.utils.mxfp4_int4"

# A namespace package straight from the checkout: the finder hides an installed vLLM.
AS_NAMESPACE = f"""
import importlib.machinery, sys
class Checkout:
    def find_spec(name, path=None, target=None):
        if name == "vllm" or name.startswith("vllm_"):
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [{str(ROOT / "vllm")!r}]
            return spec if name == "vllm" else None
sys.meta_path.insert(0, Checkout)
import {NAME} as package
"""

BY_FILE = f"""
import importlib.util, sys
folder = {str(ROOT / NAME.replace(".", "/"))!r}
spec = importlib.util.spec_from_file_location(
    "elsewhere", folder + "/__init__.py", submodule_search_locations=[folder])
package = importlib.util.module_from_spec(spec)
sys.modules["elsewhere"] = package
spec.loader.exec_module(package)
"""

WORK = """
import torch
weight, scale = torch.zeros(1, 16, 32).byte(), torch.full((1, 16, 2), 120).byte()
for layout in ("aiter", "pack_quantized", "plain"):
    package.convert_experts(weight, scale, layout=layout, collect_stats=True)
loaded = {name.partition(".")[0] for name in sys.modules}
engine = {n for n in sys.modules if n.startswith("vllm.") and "mxfp4_int4" not in n}
# The empty parents of the namespace are all there is of vLLM.
engine = {n for n in engine if getattr(sys.modules[n], "__file__", None)}
others = {"aiter", "triton", "transformers", "vllm_overlay", "rich", "numba"}
print("LOADED", sorted(engine | loaded & others))
"""


@pytest.mark.parametrize("way", [AS_NAMESPACE, BY_FILE], ids=["namespace", "by file"])
def test_importing_and_converting_loads_nothing_else(way):
    done = subprocess.run(
        [sys.executable, "-c", way + WORK], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout


def test_no_package_file_above_it():
    folder = ROOT / NAME.replace(".", "/")
    assert not (ROOT / "vllm/__init__.py").exists()
    assert not (folder.parent / "__init__.py").exists()


def test_imports_are_relative_or_of_torch_and_triton():
    allowed = {"torch", "triton", "collections", "concurrent", "contextlib", "dataclasses"}
    allowed |= {"ctypes", "functools", "hashlib", "importlib", "itertools", "logging", "os"}
    allowed |= {"pathlib", "platform", "shlex", "shutil", "stat", "subprocess", "tempfile"}
    allowed |= {"threading", "time", "typing"}
    for path in (ROOT / NAME.replace(".", "/")).glob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and not words[1].startswith("."):
                assert words[1].partition(".")[0] in allowed, f"{path.name}: {line}"
