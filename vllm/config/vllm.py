# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The int4 flag for Kimi-K3's experts is honoured or refused, on every platform, for every model.

Ledger
    What: `VllmConfig.try_verify_and_update_config` first refuses
        `--quantization-config.moe.weight int4_per_group_32` where it could not be honoured.
    Why: upstream parses the flag everywhere and ignores it in silence everywhere but for Kimi-K3 on
        gfx942 with AITER: on other GPUs, for other models and checkpoints.
    How: wrap one method, which every configuration runs before an engine starts.
    Upstream: https://github.com/vllm-project/vllm/pull/51274 (the flag); to file: [Bug]
        int4_per_group_32 is accepted and ignored where it has no effect.
    Remove when: upstream refuses the flag at start-up wherever it has no effect.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm_overlay import require

require(f"{__name__}:VllmConfig.try_verify_and_update_config", parameters=("self",))
require(f"{__name__}:VllmConfig.__post_init__", uses=("try_verify_and_update_config",))


@patch_function_wrapper(__name__, "VllmConfig.try_verify_and_update_config")
def _check_int4(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from vllm.model_executor.layers.quantization.utils.k3_int4 import facts

    facts.check_config(instance)
    return wrapped(*args, **kwargs)
