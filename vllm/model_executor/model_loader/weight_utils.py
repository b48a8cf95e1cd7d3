# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`--load-format fastsafetensors` on the CPU platform.

Ledger
    What: `fastsafetensors_weights_iterator` reads into host memory on the CPU platform.
    Why: upstream builds the device string `cuda:cpu` there, which torch refuses.
    How: wrap one function; `fastsafetensors_cpu` beside it does the work.
    Upstream: none found; to file: [Bug][CPU] fastsafetensors_weights_iterator builds the device
        string cuda:cpu.
    Remove when: upstream's function takes its device from the platform.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm_overlay import require

OVERLAY_OPTIONAL = True

require(
    f"{__name__}:fastsafetensors_weights_iterator",
    parameters=("hf_weights_files", "use_tqdm_on_load"),
)


@patch_function_wrapper(__name__, "fastsafetensors_weights_iterator")
def _on_host(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return wrapped(*args, **kwargs)
    from vllm.model_executor.model_loader.fastsafetensors_cpu import iterate

    return iterate(*args, **kwargs)
