# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What Kimi-K3 can do on the CPU platform, settled once, early, in the engine's configuration.

It changes fields of a `VllmConfig` and says so in one log line, or refuses what cannot be served.
Of a checkpoint it reads headers, never a weight.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3_checkpoint.check import check_checkpoint
from k3_checkpoint.formats import Format, declared_format
from k3_checkpoint.spec import (
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    ModelSpec,
)
from mxfp4_int4 import GROUP_SIZE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ACTIVATIONS = ("situ", "silu")
# What upstream's CPU decode kernel is compiled for, which is what Kimi-K3 has.
_CPU_LATENT = (KV_LORA_RANK, QK_ROPE_HEAD_DIM)
# Formats of experts that cannot be split within a group.
_GROUPED = (Format.MXFP4, Format.INT4, Format.MIXED)
_CHECKED_FORMATS = ("auto", "safetensors", "fastsafetensors")


def configure(vllm_config: "VllmConfig") -> None:
    """Adapt a configuration of a Kimi-K3 model to the CPU platform.

    Args:
        vllm_config: changed in place: prefix caching and chunked prefill are switched off
            (upstream's CPU MLA computes a prompt in one piece), and MLA takes the backend that
            computes in every dtype.

    Raises:
        ValueError: what cannot be served: speculative decoding, sizes that do not divide by the
            number of ranks or that the CPU's attention kernel lacks, an unknown activation, or a
            checkpoint folder that is not complete.

    """
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    logger = init_logger(__name__)
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "Kimi-K3 on a CPU serves one token per request and step: found a speculative_config. "
            "Start without --speculative-config."
        )
    _check_model(vllm_config)

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


def _check_model(vllm_config: "VllmConfig") -> None:
    """Refuse, before an engine starts, a model that it could not load or compute."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    text = config.get("text_config", config)
    parallel = vllm_config.parallel_config
    problems = list(
        model_problems(
            text,
            ranks=parallel.tensor_parallel_size,
            expert_parallel=parallel.enable_expert_parallel,
        )
    )
    if problems:
        raise ValueError("Kimi-K3 cannot be served like this on a CPU: " + "; ".join(problems))
    folder = Path(model.model)
    if folder.is_dir() and vllm_config.load_config.load_format in _CHECKED_FORMATS:
        check_checkpoint(
            folder,
            ModelSpec.from_config(config),
            experts=declared_format(text) in (Format.PLAIN, Format.MXFP4),
        )


def model_problems(text: Mapping[str, Any], *, ranks: int, expert_parallel: bool) -> Iterator[str]:
    """What keeps a text model's config.json from being served on a CPU, one sentence each.

    Args:
        text: the text model's configuration.
        ranks: tensor-parallel size.
        expert_parallel: experts are spread over ranks, not split.

    """
    linear = text["linear_attn_config"]
    if not linear.get("use_full_rank_gate", False):
        yield "linear_attn_config.use_full_rank_gate: expected true (Kimi-K3), found false"
    if text["hidden_act"] not in _ACTIVATIONS:
        yield f"hidden_act: expected one of {_ACTIVATIONS}, found {text['hidden_act']!r}"
    for name, heads in (
        ("num_attention_heads", text["num_attention_heads"]),
        ("linear_attn_config.num_heads", linear["num_heads"]),
    ):
        if heads % ranks:
            yield f"{name}: expected a multiple of the tensor-parallel size {ranks}, found {heads}"
    rotary = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if rotary > 4 and rotary % 2:
        yield (
            "hidden_size / num_attention_heads: expected an even number, for transformers refuses "
            f"config.json otherwise, found {rotary}"
        )
    found = (text["kv_lora_rank"], text["qk_rope_head_dim"])
    if linear["full_attn_layers"] and found != _CPU_LATENT:
        yield (
            f"kv_lora_rank and qk_rope_head_dim: expected {_CPU_LATENT} (the CPU kernel's), found "
            f"{found}"
        )
    split = ranks * GROUP_SIZE
    inner = text["moe_intermediate_size"]
    if declared_format(text) in _GROUPED and not expert_parallel and inner % split:
        yield (
            f"moe_intermediate_size: expected a multiple of {split} to split MXFP4 groups of "
            f"{GROUP_SIZE} over {ranks} ranks, found {inner}; use --enable-expert-parallel"
        )
