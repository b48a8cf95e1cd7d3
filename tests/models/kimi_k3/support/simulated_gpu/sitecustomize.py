# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Simulates a GPU in every process of a vLLM server that has this folder in its PYTHONPATH.

The environment variable SIMULATED_GPU names the architecture.
"""

import os

from simulated_gpu import ARCHITECTURES, install_rocm_module, pretend
from wrapt import register_post_import_hook

_architecture = os.environ["SIMULATED_GPU"]
if _architecture in ARCHITECTURES:
    install_rocm_module(_architecture)
register_post_import_hook(
    lambda module: pretend(_architecture, module.CpuPlatform), "vllm.platforms.cpu"
)
