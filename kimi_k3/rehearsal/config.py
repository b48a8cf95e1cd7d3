# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads a checkpoint's config.json and refuses one that no Kimi-K3 has. Imports neither torch nor
vLLM, and computes nothing from the sizes."""

from pathlib import Path
from typing import Any

from k3_checkpoint import files

_POSITIVE = (
    "attn_res_block_size",
    "first_k_dense_replace",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "min_moe_intermediate_per_partition",
    "moe_intermediate_size",
    "moe_layer_freq",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_token",
    "num_hidden_layers",
    "num_shared_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "routed_expert_hidden_size",
    "v_head_dim",
    "vocab_size",
)
_MAY_BE_ZERO = frozenset({"first_k_dense_replace", "num_shared_experts"})
_MAY_BE_NULL = (
    "attn_res_block_size",
    "num_shared_experts",
    "q_lora_rank",
    "routed_expert_hidden_size",
)
_LINEAR = ("head_dim", "num_heads", "short_conv_kernel_size")
_VISION = (
    "init_pos_emb_height",
    "patch_size",
    "qkv_hidden_size",
    "text_hidden_size",
    "vt_hidden_size",
    "vt_intermediate_size",
    "vt_num_attention_heads",
    "vt_num_hidden_layers",
)
# Far beyond any model; a size above it is a mistake, not a plan.
_LARGEST = 2**31
# The same for routed experts in all layers (Kimi-K3: 82,432), each of which is looked at.
_MOST_EXPERTS = 10_000_000


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json, checked.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no Kimi-K3's; every fault is named.
    """
    try:
        config = files.read_config(folder)
        check_config(config)
    except ValueError as error:
        raise ValueError(f"{folder / files.CONFIG_NAME}: {error}") from error
    return config


def check_config(config: dict[str, Any]) -> None:
    """Refuse a configuration whose parts or sizes no Kimi-K3 can have.

    Raises:
        ValueError: Names every fault.
    """
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ValueError(f"text_config: expected an object, found {text!r}")
    vision = config.get("vision_config")
    problems = [
        f"{name}: expected an object, found {part!r}"
        for name, part in (
            ("linear_attn_config", text.get("linear_attn_config")),
            ("quantization_config", text.get("quantization_config", {})),
            ("vision_config", {} if vision is None else vision),
        )
        if not isinstance(part, dict)
    ]
    if problems:
        raise ValueError("expected a Kimi-K3: " + "; ".join(problems))
    optional = {name for name in _MAY_BE_NULL if text.get(name) is None}
    vision = vision or {}
    merge = vision.get("merge_kernel_size", [1])
    found = [(name, text[name]) for name in _POSITIVE if name in text.keys() - optional]
    linear = text["linear_attn_config"]
    found += [(f"linear_attn_config.{name}", linear[name]) for name in _LINEAR if name in linear]
    found += [(f"vision_config.{name}", vision[name]) for name in _VISION if name in vision]
    found += [
        ("vision_config.merge_kernel_size", size)
        for size in (merge if isinstance(merge, list) and merge else [merge])
    ]
    problems = [
        f"{name}: expected a whole number from 1 to {_LARGEST}, found {value!r}"
        for name, value in found
        if not _is_size(value, 0 if name in _MAY_BE_ZERO else 1)
    ]
    if problems:
        raise ValueError("expected a Kimi-K3: " + "; ".join(problems))
    experts = text.get("num_experts", 1) * text.get("num_hidden_layers", 1)
    if experts > _MOST_EXPERTS:
        raise ValueError(
            "expected a Kimi-K3: num_experts times num_hidden_layers: expected at most "
            f"{_MOST_EXPERTS:,}, found {experts:,}"
        )
    layers, kda = text.get("num_hidden_layers", 0), text["linear_attn_config"].get("kda_layers", [])
    if not isinstance(kda, list) or not all(_is_size(n, 1) and n <= layers for n in kda):
        raise ValueError(
            f"expected a Kimi-K3: kda_layers: expected a list of layers from 1 to {layers}, found "
            f"{kda!r}"
        )


def _is_size(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
