# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Loads the conversion package of this checkout by its file, so that a benchmark needs torch (and
Triton on a GPU) and no vLLM. Never used outside benchmarks."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm/model_executor/layers/quantization/utils/mxfp4_int4"


def load_mxfp4_int4() -> ModuleType:
    """The package, under the name `mxfp4_int4`; its submodules import as usual after this."""
    name = "mxfp4_int4"
    if name not in sys.modules:
        folder = ROOT / PACKAGE
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder}/__init__.py: expected the conversion package there")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
