# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Unquantized SiTU experts on the CPU platform.

Ledger
    What: `backend_to_kernel_cls` adds `CPUSituExperts` to the CPU backend's list, at its end.
    Why: no CPU kernel of upstream knows the SiTU activation, so Kimi-K3 finds no experts.
    How: wrap one function.
    Upstream: none found for CPUs (https://github.com/vllm-project/vllm/pull/50510 is Humming's); to
        file: [CPU] SiTU activation in CPU experts, for Kimi-K3.
    Remove when: one of upstream's CPU experts supports `MoEActivation.SITU`.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm_overlay import require

_backends = require(f"{__name__}:UnquantizedMoeBackend")
require(f"{__name__}:UnquantizedMoeBackend.CPU")
require(f"{__name__}:backend_to_kernel_cls", parameters=("backend",))
require("vllm.model_executor.layers.fused_moe.activation:MoEActivation.SITU")


@patch_function_wrapper(__name__, "backend_to_kernel_cls")
def _with_situ(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    classes = wrapped(*args, **kwargs)
    if (args[0] if args else kwargs["backend"]) != _backends.CPU:
        return classes
    from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import CPUSituExperts

    return [*classes, CPUSituExperts]
