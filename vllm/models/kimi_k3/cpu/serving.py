# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What Kimi-K3 can do on the CPU platform, settled once, early, in the engine's configuration.

It changes fields of a `VllmConfig` and says so in one log line, or refuses what cannot be served.
It never looks at weights.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def configure(vllm_config: "VllmConfig") -> None:
    """Adapt a configuration of a Kimi-K3 model to the CPU platform.

    Args:
        vllm_config: changed in place: prefix caching and chunked prefill are switched off
            (upstream's CPU MLA computes a prompt in one piece), and MLA takes the backend that
            computes in every dtype.

    Raises:
        ValueError: speculative decoding was asked for, or attention shapes that the CPU kernel
            lacks.

    """
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    logger = init_logger(__name__)
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "Kimi-K3 on a CPU serves one token per request and step: found a speculative_config. "
            "Start without --speculative-config."
        )
    _check_latent_shape(vllm_config.model_config.hf_text_config)

    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    switched_off = [
        name
        for name, on in (
            ("prefix caching", cache.enable_prefix_caching),
            ("chunked prefill", scheduler.enable_chunked_prefill),
        )
        if on
    ]
    cache.enable_prefix_caching = False
    scheduler.enable_chunked_prefill = False
    if switched_off:
        logger.info(
            "Kimi-K3 on a CPU: %s switched off, because the CPU's MLA computes each prompt in one "
            "piece.",
            " and ".join(switched_off),
        )
    if vllm_config.attention_config.backend is None:
        vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA


def _check_latent_shape(config) -> None:
    """Refuse a compressed cache that the CPU decode kernel is not compiled for."""
    has_attention = len(config.linear_attn_config["full_attn_layers"]) > 0
    found = (config.kv_lora_rank, config.qk_rope_head_dim)
    if has_attention and found != (512, 64):
        raise ValueError(
            "MLA on a CPU needs kv_lora_rank=512 and qk_rope_head_dim=64 (Kimi-K3's own), found "
            f"kv_lora_rank={found[0]} and qk_rope_head_dim={found[1]} in config.json"
        )
