# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Every tensor of a Kimi-K3 checkpoint: name, dtype, shape and the part it plays.

Names and shapes are those of the published checkpoint; with Kimi-K3's own sizes there are 497,220.
No tensor is ever allocated here.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import prod

from k3_checkpoint.formats import PACKED, SCALE
from k3_checkpoint.spec import (
    A_LOG_ENTRIES,
    CONV_WIDTH,
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    ExpertFormat,
    ModelSpec,
    VisionSpec,
)
from mxfp4_int4 import GROUP_SIZE

DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


class Role(Enum):
    """What a tensor is for, which decides how its values are drawn."""

    LINEAR = auto()
    EMBEDDING = auto()
    LM_HEAD = auto()
    NORM = auto()
    CONV = auto()
    A_LOG = auto()
    DT_BIAS = auto()
    ROUTER_BIAS = auto()
    CODES = auto()
    SCALES = auto()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    ``unit`` groups tensors that stay together in a shard (the six of an expert).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    unit: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def checkpoint_tensors(
    spec: ModelSpec, seed: int = 0, *, experts: bool = True
) -> Iterator[TensorSpec]:
    """All tensors of a checkpoint in the order in which they are stored.

    Args:
        spec: sizes.
        seed: of the order of experts within a layer, which is not that of their ids.
        experts: also the routed experts, which are nearly all tensors of a checkpoint.

    Yields:
        vision tensors, if there are any, then embeddings, layers, and the head.

    """
    if spec.vision is not None:
        yield from _vision(spec.vision, spec.hidden_size)
    model = f"{spec.text_prefix}model."
    hidden = spec.hidden_size
    yield _one(f"{model}embed_tokens.weight", (spec.vocab_size, hidden), Role.EMBEDDING)
    order = random.Random(seed)
    for layer in range(spec.layers):
        prefix = f"{model}layers.{layer}."
        yield from _mixers(prefix, hidden)
        yield from (_mla if spec.is_mla(layer) else _kda)(f"{prefix}self_attn.", spec)
        if spec.is_moe(layer):
            yield from _moe(f"{prefix}block_sparse_moe.", spec)
            if experts:
                yield from _experts(f"{prefix}block_sparse_moe.experts.", spec, order)
        else:
            yield from _gated(f"{prefix}mlp.", hidden, spec.dense_intermediate_size)
    yield _one(f"{model}norm.weight", (hidden,), Role.NORM)
    yield _one(f"{model}output_attn_res_norm.weight", (hidden,), Role.NORM)
    yield _one(f"{model}output_attn_res_proj.weight", (1, hidden))
    yield _one(f"{spec.text_prefix}lm_head.weight", (spec.vocab_size, hidden), Role.LM_HEAD)


def _one(
    name: str, shape: tuple[int, ...], role: Role = Role.LINEAR, dtype: str = "BF16"
) -> TensorSpec:
    return TensorSpec(name, dtype, shape, role, unit=name)


def _mixers(prefix: str, hidden: int) -> Iterator[TensorSpec]:
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attention_res_norm",
        "mlp_res_norm",
    ):
        yield _one(f"{prefix}{name}.weight", (hidden,), Role.NORM)
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        yield _one(f"{prefix}{name}.weight", (1, hidden))


def _gated(prefix: str, hidden: int, intermediate: int) -> Iterator[TensorSpec]:
    yield _one(f"{prefix}gate_proj.weight", (intermediate, hidden))
    yield _one(f"{prefix}up_proj.weight", (intermediate, hidden))
    yield _one(f"{prefix}down_proj.weight", (hidden, intermediate))


def _kda(prefix: str, spec: ModelSpec) -> Iterator[TensorSpec]:
    hidden, dim = spec.hidden_size, spec.head_dim
    width = spec.heads * dim
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        yield _one(f"{prefix}{name}.weight", (width, hidden))
    yield _one(f"{prefix}f_a_proj.weight", (dim, hidden))
    yield _one(f"{prefix}f_b_proj.weight", (width, dim))
    yield _one(f"{prefix}b_proj.weight", (spec.heads, hidden))
    yield _one(f"{prefix}o_proj.weight", (hidden, width))
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield _one(f"{prefix}{name}.weight", (width, 1, CONV_WIDTH), Role.CONV, "F32")
    yield _one(f"{prefix}dt_bias", (width,), Role.DT_BIAS, "F32")
    yield _one(f"{prefix}o_norm.weight", (dim,), Role.NORM, "F32")
    yield _one(f"{prefix}A_log", (max(spec.heads, A_LOG_ENTRIES),), Role.A_LOG, "F32")


def _mla(prefix: str, spec: ModelSpec) -> Iterator[TensorSpec]:
    hidden, heads = spec.hidden_size, spec.heads
    query = spec.qk_nope_head_dim + QK_ROPE_HEAD_DIM
    value = heads * spec.v_head_dim
    yield _one(f"{prefix}q_a_proj.weight", (spec.q_lora_rank, hidden))
    yield _one(f"{prefix}q_a_layernorm.weight", (spec.q_lora_rank,), Role.NORM)
    yield _one(f"{prefix}q_b_proj.weight", (heads * query, spec.q_lora_rank))
    yield _one(f"{prefix}kv_a_proj_with_mqa.weight", (KV_LORA_RANK + QK_ROPE_HEAD_DIM, hidden))
    yield _one(f"{prefix}kv_a_layernorm.weight", (KV_LORA_RANK,), Role.NORM)
    yield _one(
        f"{prefix}kv_b_proj.weight",
        (heads * (spec.qk_nope_head_dim + spec.v_head_dim), KV_LORA_RANK),
    )
    yield _one(f"{prefix}g_proj.weight", (value, hidden))
    yield _one(f"{prefix}o_proj.weight", (hidden, value))


def _moe(prefix: str, spec: ModelSpec) -> Iterator[TensorSpec]:
    hidden, latent = spec.hidden_size, spec.latent_size
    yield _one(f"{prefix}gate.weight", (spec.experts, hidden))
    yield _one(f"{prefix}gate.e_score_correction_bias", (spec.experts,), Role.ROUTER_BIAS, "F32")
    yield _one(f"{prefix}routed_expert_down_proj.weight", (latent, hidden))
    yield _one(f"{prefix}routed_expert_norm.weight", (latent,), Role.NORM)
    yield _one(f"{prefix}routed_expert_up_proj.weight", (hidden, latent))
    shared = spec.shared_experts * spec.expert_intermediate_size
    yield from _gated(f"{prefix}shared_experts.", hidden, shared)


def _experts(prefix: str, spec: ModelSpec, order: random.Random) -> Iterator[TensorSpec]:
    ids = list(range(spec.experts))
    order.shuffle(ids)
    leaves = expert_tensors(spec)
    for expert in ids:
        unit = f"{prefix}{expert}."
        for leaf in leaves:
            yield TensorSpec(f"{unit}{leaf.name}", leaf.dtype, leaf.shape, leaf.role, unit)


def expert_prefixes(spec: ModelSpec) -> Iterator[str]:
    """Yield, for each layer that has routed experts, what stands before their ids."""
    for layer in range(spec.layers):
        if spec.is_moe(layer):
            yield f"{spec.text_prefix}model.layers.{layer}.block_sparse_moe.experts."


def expert_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Return the tensors that each routed expert has, with names from behind its id."""
    inner, latent = spec.expert_intermediate_size, spec.latent_size
    found = []
    for name, rows, columns in (
        ("w1", inner, latent),
        ("w2", latent, inner),
        ("w3", inner, latent),
    ):
        if spec.expert_format is ExpertFormat.BF16:
            found.append(_one(f"{name}.weight", (rows, columns)))
            continue
        groups = (rows, columns // GROUP_SIZE)
        found.append(_one(f"{name}.{PACKED}", (rows, columns // 2), Role.CODES, "U8"))
        found.append(_one(f"{name}.{SCALE}", groups, Role.SCALES, "U8"))
    return found


def _vision(vision: VisionSpec, text_hidden: int) -> Iterator[TensorSpec]:
    hidden, grid = vision.hidden_size, vision.position_grid
    tower = "vision_tower."
    yield _one(f"{tower}patch_embed.proj.weight", (hidden, 3, vision.patch_size, vision.patch_size))
    yield _one(f"{tower}patch_embed.pos_emb.weight", (grid, grid, hidden), Role.NORM)
    for layer in range(vision.layers):
        block = f"{tower}encoder.blocks.{layer}."
        yield _one(f"{block}norm0.weight", (hidden,), Role.NORM)
        yield _one(f"{block}norm1.weight", (hidden,), Role.NORM)
        yield _one(f"{block}wqkv.weight", (3 * vision.qkv_hidden_size, hidden))
        yield _one(f"{block}wo.weight", (hidden, vision.qkv_hidden_size))
        yield _one(f"{block}mlp.fc0.weight", (vision.intermediate_size, hidden))
        yield _one(f"{block}mlp.fc1.weight", (hidden, vision.intermediate_size))
    yield _one(f"{tower}encoder.final_layernorm.weight", (hidden,), Role.NORM)
    merged = hidden * vision.merge**2
    yield _one("mm_projector.proj.0.weight", (merged, merged))
    yield _one("mm_projector.proj.2.weight", (text_hidden, merged))
    yield _one("mm_projector.post_norm.weight", (text_hidden,), Role.NORM)
