# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3 checkpoints, text-only ones included, are configured for what the CPU platform can do.

Ledger
    What: `MODELS_CONFIG_MAP` gains `KimiLinearForCausalLM`;
        `KimiK3ForConditionalGenerationConfig` gains `verify_and_update_config`.
    Why: without the entry a text-only checkpoint's `mxfp4-pack-quantized` experts are not routed to
        the MXFP4 interface. And on a CPU, prefix caching and chunked prefill are switched off only
        after sizes have been derived from them, with a line that does not name the model.
    How: add one entry to a dict and one class method to a class.
    Upstream: https://github.com/vllm-project/vllm/issues/52008 (Kimi-K3 on a CPU: prefix caching
        and MLA).
    Remove when: upstream's map has the entry and its class defines `verify_and_update_config`.
"""

from typing import Any

from vllm_overlay import require

_map = require(f"{__name__}:MODELS_CONFIG_MAP")
_config = require(f"{__name__}:KimiK3ForConditionalGenerationConfig")
require(
    f"{__name__}:KimiK3ForConditionalGenerationConfig.verify_and_update_model_config",
    parameters=("model_config",),
)
require(f"{__name__}:VerifyAndUpdateConfig.verify_and_update_config", parameters=("vllm_config",))


def _verify_and_update_config(cls: Any, vllm_config: Any) -> None:
    """On the CPU platform, settle what Kimi-K3 can do there before sizes are derived from it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.models.kimi_k3.cpu.serving import configure

        configure(vllm_config)


if "verify_and_update_config" not in vars(_config):
    _config.verify_and_update_config = classmethod(_verify_and_update_config)
_map.setdefault("KimiLinearForCausalLM", _config)
