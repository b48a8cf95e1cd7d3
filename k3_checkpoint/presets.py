# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The models that `kimi-k3 make-checkpoint --preset` knows by name."""

from dataclasses import replace

from k3_checkpoint.spec import ModelSpec, VisionSpec

_TINY = ModelSpec(
    layers=5,
    hidden_size=256,
    heads=4,
    head_dim=64,
    vocab_size=512,
    q_lora_rank=128,
    qk_nope_head_dim=64,
    v_head_dim=64,
    experts=16,
    experts_per_token=4,
    latent_size=128,
    expert_intermediate_size=64,
    dense_intermediate_size=512,
    attn_res_block_size=2,
    max_position_embeddings=4096,
    vision=VisionSpec(
        layers=2,
        hidden_size=64,
        heads=2,
        qkv_hidden_size=96,
        intermediate_size=128,
        position_grid=16,
    ),
)

PRESETS: dict[str, ModelSpec] = {
    "tiny": _TINY,
    "small": replace(
        _TINY,
        layers=8,
        hidden_size=1024,
        heads=8,
        head_dim=128,
        vocab_size=4096,
        q_lora_rank=256,
        qk_nope_head_dim=128,
        v_head_dim=128,
        experts=64,
        experts_per_token=8,
        latent_size=512,
        expert_intermediate_size=256,
        dense_intermediate_size=4096,
        attn_res_block_size=4,
    ),
    "k3-shapes": ModelSpec(),
}
