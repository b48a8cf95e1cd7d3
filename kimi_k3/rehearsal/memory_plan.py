# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The memory plan of one rank from config.json alone, in milliseconds.

Imports neither torch nor the engine. Every rule here is one of vLLM's model classes for ROCm; a
test holds the sums equal to the real model's, built on the meta device.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

from k3_checkpoint.formats import INT4_PACKED, MXFP4_PACKED
from k3_checkpoint.spec import ModelSpec, VisionSpec
from k3_checkpoint.tensors import checkpoint_tensors
from kimi_k3.rehearsal.components import (
    CHUNK_EXPERTS,
    EXPERTS,
    SCALES,
    MemoryPlan,
    summed,
)
from kimi_k3.rehearsal.config import check_config
from kimi_k3.rehearsal.ranks import FP8, Layout

BF16, F32, U8 = 2, 4, 1
# vLLM's model classes for ROCm: alignment rows of the merged KDA projection, least slice of an
# expert, alignment of experts for AITER's SiTU kernel and in general, rows of the vocabulary.
_KDA_ROWS, _LEAST_SLICE, _ALIGNMENT, _GENERAL_ALIGNMENT, _VOCABULARY = 16, 256, 128, 256, 64
_GROUP = 32  # values that share a scale
# config.json's names of the formats of experts that a plan can be made for.


def plan(config: dict[str, Any], layout: Layout) -> MemoryPlan:
    """Return the memory plan of one rank.

    Args:
        config: Contents of config.json, of the full or of the text model.
        layout: The rank and its layout.

    Raises:
        ValueError: The model is not a Kimi-K3 with MXFP4 or int4 experts, or does not divide by the
            ranks.
    """
    text = config.get("text_config", config)
    _check(text, layout)
    kda = frozenset(index - 1 for index in text["linear_attn_config"]["kda_layers"])
    components = summed(_parameters(text, layout, kda), kda)
    rounded = summed(_parameters(text, replace(layout, rounded=True), kda), kda)
    experts, inner, latent = _expert_sizes(text, layout)
    chunk = 0 if _holds_int4(text) else min(CHUNK_EXPERTS, experts)
    transient = (
        2 * inner * latent // _GROUP * experts * BF16 + chunk * 2 * inner * latent // 2,
        latent * inner // _GROUP * experts * BF16 + chunk * latent * inner // 2,
    )
    mla_layers = text["num_hidden_layers"] - len(kda)
    heads = text["num_attention_heads"] // layout.tensor_parallel_size
    absorbed = heads * (text["qk_nope_head_dim"] + text["v_head_dim"]) * text["kv_lora_rank"] * BF16
    return MemoryPlan(
        components=components,
        rounding=sum(rounded[name] - components[name] for name in (EXPERTS, SCALES)),
        int4_scales=components[SCALES] * (BF16 - U8) if chunk else 0,
        int4_transient=max(transient) if chunk and components[EXPERTS] else 0,
        absorbed=mla_layers * absorbed,
        vision=_vision(config),
    )


def _check(text: dict[str, Any], layout: Layout) -> None:
    check_config(text)
    tp = layout.tensor_parallel_size
    problems = []
    if not 0 <= layout.rank < tp:
        problems.append(f"rank {layout.rank} lies outside a layout of {tp}")
    experts = text.get("quantization_config", {}).get("format")
    if experts not in (MXFP4_PACKED, INT4_PACKED):
        problems.append(
            f"expected experts in {MXFP4_PACKED}, found {experts} ({INT4_PACKED} int4 will do)"
        )
    if text["q_lora_rank"] is None:
        problems.append("expected MLA layers with a q_lora_rank")
    if not text.get("linear_attn_config", {}).get("use_full_rank_gate"):
        problems.append("expected KDA layers with a full-rank gate")
    problems += indivisible(text, tp)
    if problems:
        raise ValueError("cannot plan this: " + "; ".join(problems))


def indivisible(text: dict[str, Any], ranks: int) -> list[str]:
    """Say which sizes of a text model do not divide by a number of tensor-parallel ranks."""
    shared = text["moe_intermediate_size"] * (text.get("num_shared_experts") or 0)
    sizes = (
        ("attention heads", text["num_attention_heads"]),
        ("KDA heads", text.get("linear_attn_config", {}).get("num_heads", 0)),
        ("vocabulary rows", _up(text["vocab_size"], _VOCABULARY)),
        ("dense intermediate size", text["intermediate_size"]),
        ("expert intermediate size", text["moe_intermediate_size"]),
        ("shared experts' intermediate size", shared),
    )
    return [
        f"{what}: {size} is not divisible by {ranks} ranks" for what, size in sizes if size % ranks
    ]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _expert_sizes(text: dict[str, Any], layout: Layout) -> tuple[int, int, int]:
    """Return this rank's experts and the intermediate and hidden size that each has in memory."""
    tp, size = layout.tensor_parallel_size, text["moe_intermediate_size"]
    least = text.get("min_moe_intermediate_per_partition", _LEAST_SLICE)
    if tp > 1 and size // tp < least:
        size = least * tp
    experts = text["num_experts"]
    latent = text.get("routed_expert_hidden_size") or text["hidden_size"]
    if layout.expert_parallel and tp > 1:
        experts = experts // tp + (layout.rank < experts % tp)
    else:
        size //= tp
    alignment = _GENERAL_ALIGNMENT if layout.rounded else _ALIGNMENT
    return experts, _up(size, alignment), _up(latent, alignment)


def _parameters(
    text: dict[str, Any], layout: Layout, kda: frozenset[int]
) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of every parameter, by the names of vLLM's model."""
    hidden = text["hidden_size"]
    vocabulary = _up(text["vocab_size"], _VOCABULARY) // layout.tensor_parallel_size
    yield "model.embed_tokens.weight", vocabulary * hidden * BF16
    yield "lm_head.weight", vocabulary * hidden * BF16
    mixes = text.get("attn_res_block_size") is not None
    # The final norm, and the norm and row that mix the output.
    yield "model.norm.weight", hidden * BF16 * (3 if mixes else 1)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", hidden * BF16 * (6 if mixes else 2)
        attention = _kda if layer in kda else _mla
        for name, nbytes in attention(text, layout):
            yield f"{prefix}self_attn.{name}", nbytes
        moe = layer >= text["first_k_dense_replace"] and layer % text.get("moe_layer_freq", 1) == 0
        if moe:
            for name, nbytes in _moe(text, layout):
                yield f"{prefix}block_sparse_moe.{name}", nbytes
        else:
            yield f"{prefix}mlp.proj", _gated(layout, hidden, text["intermediate_size"])


def _linear(layout: Layout, rows: int, columns: int) -> int:
    return rows * columns + rows * F32 if layout.linear == FP8 else rows * columns * BF16


def _kda(text: dict[str, Any], layout: Layout) -> Iterator[tuple[str, int]]:
    config, hidden = text["linear_attn_config"], text["hidden_size"]
    heads, dim = config["num_heads"] // layout.tensor_parallel_size, config["head_dim"]
    width = heads * dim
    rows = _up(4 * width + dim + heads, _KDA_ROWS)
    yield "in_proj_qkvgfab", _linear(layout, rows, hidden)
    yield "f_b_proj", _linear(layout, width, dim)
    yield "o_proj", _linear(layout, hidden, width)
    yield "conv1d", 3 * width * config["short_conv_kernel_size"] * F32
    yield "dt_bias", width * F32
    yield "A_log", heads * F32
    yield "o_norm", dim * BF16


def _mla(text: dict[str, Any], layout: Layout) -> Iterator[tuple[str, int]]:
    hidden, rank, query = text["hidden_size"], text["kv_lora_rank"], text["q_lora_rank"]
    heads = text["num_attention_heads"] // layout.tensor_parallel_size
    nope, rope, value = (text[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    yield "fused_qkv_a_proj", _linear(layout, query + rank + rope, hidden)
    yield "q_b_proj", _linear(layout, heads * (nope + rope), query)
    yield "kv_b_proj", _linear(layout, heads * (nope + value), rank)
    if text.get("mla_use_output_gate"):
        yield "g_proj", _linear(layout, heads * value, hidden)
    yield "o_proj", _linear(layout, hidden, heads * value)
    yield "layernorms", (query + rank) * BF16


def _gated(layout: Layout, hidden: int, size: int) -> int:
    inner = size // layout.tensor_parallel_size
    return _linear(layout, 2 * inner, hidden) + _linear(layout, hidden, inner)


def _moe(text: dict[str, Any], layout: Layout) -> Iterator[tuple[str, int]]:
    hidden, tp = text["hidden_size"], layout.tensor_parallel_size
    yield "gate.weight", text["num_experts"] * (hidden * BF16 + F32)
    shared = text.get("num_shared_experts")
    if shared is not None:
        size = shared * text["moe_intermediate_size"]
        yield "shared_experts.proj", _gated(layout, hidden, size)
    latent = text.get("routed_expert_hidden_size")
    if latent is not None:
        unscaled = text["routed_scaling_factor"] == 1.0
        sharded = tp > 1 and hidden % tp == 0 and shared is not None and unscaled
        yield "routed_expert_down_proj", latent * hidden * BF16
        yield "routed_expert_up_proj", latent * hidden // (tp if sharded else 1) * BF16
        if text.get("latent_moe_use_norm"):
            yield "norm", latent * BF16
    experts, inner, width = _expert_sizes(text, layout)
    values = experts * 3 * inner * width
    yield "experts.routed_experts.weights", values // 2
    scale = BF16 if _holds_int4(text) else U8
    yield "experts.routed_experts.w13_weight_scale", values // _GROUP * scale


def _holds_int4(text: dict[str, Any]) -> bool:
    """Tell whether the checkpoint's experts are int4 already."""
    return text["quantization_config"]["format"] == INT4_PACKED


def _vision(config: dict[str, Any]) -> int:
    """Return the bytes of the vision tower's tensors; 0 for a text-only model."""
    vision = config.get("vision_config")
    if vision is None:
        return 0
    spec = ModelSpec(
        hidden_size=vision["text_hidden_size"],
        vision=VisionSpec(
            layers=vision["vt_num_hidden_layers"],
            hidden_size=vision["vt_hidden_size"],
            heads=vision["vt_num_attention_heads"],
            qkv_hidden_size=vision["qkv_hidden_size"],
            intermediate_size=vision["vt_intermediate_size"],
            patch_size=vision["patch_size"],
            position_grid=vision["init_pos_emb_height"],
            merge=vision["merge_kernel_size"][0],
        ),
    )
    tower = takewhile(
        lambda t: t.name.startswith(("vision_tower.", "mm_projector.")), checkpoint_tensors(spec)
    )
    return sum(tensor.nbytes for tensor in tower)
