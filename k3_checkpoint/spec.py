# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a Kimi-K3 model looks like: sizes, layer pattern and config.json.

Sizes only; which tensors follow from them is the business of `tensors`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from k3_checkpoint.formats import quantization_config
from mxfp4_int4 import GROUP_SIZE

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
CONV_WIDTH = 4
# A_log is stored with at least this many entries; those past the last head are not used.
A_LOG_ENTRIES = 128


class ExpertFormat(StrEnum):
    """How routed experts are stored."""

    MXFP4 = "mxfp4"
    BF16 = "bf16"


class Stack(StrEnum):
    """Which kinds of attention layers a model has."""

    MIXED = "mixed"
    KDA = "kda"
    MLA = "mla"


@dataclass(frozen=True)
class VisionSpec:
    """Sizes of the vision tower; the defaults are Kimi-K3's."""

    layers: int = 27
    hidden_size: int = 1024
    heads: int = 12
    qkv_hidden_size: int = 1536
    intermediate_size: int = 4096
    patch_size: int = 14
    position_grid: int = 64
    merge: int = 2


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a Kimi-K3 model; the defaults are Kimi-K3's own.

    Raises:
        ValueError: sizes that no Kimi-K3 layer can have; the message names every one of them.

    """

    layers: int = 93
    hidden_size: int = 7168
    heads: int = 96
    head_dim: int = 128
    vocab_size: int = 163840
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    experts: int = 896
    experts_per_token: int = 16
    shared_experts: int = 2
    latent_size: int = 3584
    expert_intermediate_size: int = 3072
    dense_intermediate_size: int = 33792
    attn_res_block_size: int = 12
    max_position_embeddings: int = 1048576
    stack: Stack = Stack.MIXED
    mla_layers: tuple[int, ...] | None = None
    expert_format: ExpertFormat = ExpertFormat.MXFP4
    vision: VisionSpec | None = field(default_factory=VisionSpec)

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be positive, found {value}"
            for name, value in asdict(self).items()
            if isinstance(value, int) and value < 1
        ]
        problems += [
            f"{name} must be a multiple of {GROUP_SIZE}, found {getattr(self, name)}"
            for name in ("latent_size", "expert_intermediate_size")
            if getattr(self, name) % GROUP_SIZE
        ]
        if self.hidden_size % 2:
            problems.append(f"hidden_size must be even, found {self.hidden_size}")
        rotary = self.hidden_size // max(1, self.heads)
        if rotary > 4 and rotary % 2:
            # No layer of Kimi-K3 rotates anything; transformers checks that all the same.
            problems.append(
                "hidden_size // heads must be even for transformers to read config.json, found "
                f"{self.hidden_size} // {self.heads} = {rotary}"
            )
        if self.experts_per_token > self.experts:
            problems.append(
                f"experts_per_token must be at most experts ({self.experts}), "
                f"found {self.experts_per_token}"
            )
        if problems:
            raise ValueError("not a Kimi-K3 model: " + "; ".join(problems))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Sizes of the model that a config.json describes.

        Args:
            config: its contents; the text model's alone or the whole model's.

        Raises:
            ValueError: a field is missing or of no use; the message names it.

        """
        text = config.get("text_config", config)
        try:
            linear = text["linear_attn_config"]
            quantization = text.get("quantization_config")
            mla = {layer - 1 for layer in linear["full_attn_layers"]}
            kda = {layer - 1 for layer in linear["kda_layers"]}
            layers = text["num_hidden_layers"]
            spec = cls(
                layers=layers,
                hidden_size=text["hidden_size"],
                heads=text["num_attention_heads"],
                head_dim=linear["head_dim"],
                vocab_size=text["vocab_size"],
                q_lora_rank=text["q_lora_rank"],
                qk_nope_head_dim=text["qk_nope_head_dim"],
                v_head_dim=text["v_head_dim"],
                experts=text["num_experts"],
                experts_per_token=text["num_experts_per_token"],
                shared_experts=text["num_shared_experts"],
                latent_size=text["routed_expert_hidden_size"],
                expert_intermediate_size=text["moe_intermediate_size"],
                dense_intermediate_size=text["intermediate_size"],
                attn_res_block_size=text["attn_res_block_size"],
                max_position_embeddings=text["max_position_embeddings"],
                mla_layers=tuple(sorted(mla)),
                expert_format=ExpertFormat.BF16 if quantization is None else ExpertFormat.MXFP4,
                vision=_vision_from_config(config["vision_config"]) if text is not config else None,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"config.json is not that of a Kimi-K3 model: {error!r}") from error
        for name in ("first_k_dense_replace", "moe_layer_freq"):
            if text.get(name) != 1:
                raise ValueError(f"{name}: expected 1 (Kimi-K3), found {text.get(name)!r}")
        if mla & kda or mla | kda != set(range(layers)):
            raise ValueError(
                f"linear_attn_config: expected each of the layers 1 to {layers} once, found "
                f"kda_layers={linear['kda_layers']}, full_attn_layers={linear['full_attn_layers']}"
            )
        return spec

    def is_mla(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has latent attention.

        Where ``mla_layers`` does not say: every fourth one and the last of a mixed stack.
        """
        if self.mla_layers is not None:
            return layer in self.mla_layers
        if self.stack is not Stack.MIXED:
            return self.stack is Stack.MLA
        return (layer + 1) % 4 == 0 or layer == self.layers - 1

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has routed experts: all but the first."""
        return layer > 0

    @property
    def text_prefix(self) -> str:
        """What stands before ``model.`` in the names of text tensors."""
        return "language_model." if self.vision else ""

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        text = self._text_config()
        if self.vision is None:
            return {"architectures": ["KimiLinearForCausalLM"], **text}
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            "bos_token_id": text["bos_token_id"],
            "eos_token_id": text["eos_token_id"],
            "pad_token_id": text["pad_token_id"],
            "media_placeholder_token_id": special_token_ids(self.vocab_size)["<|media_pad|>"],
            "text_config": text,
            "vision_config": _vision_config(self.vision, self.hidden_size),
        }

    def preprocessor_config(self) -> dict[str, Any]:
        """Contents of preprocessor_config.json.

        Raises:
            ValueError: the model has no vision tower.

        """
        if self.vision is None:
            raise ValueError("a text-only model has no preprocessor")
        return {
            "media_proc_cfg": {
                "patch_size": self.vision.patch_size,
                "merge_kernel_size": self.vision.merge,
                "temporal_merge_kernel_size": 4,
                "in_patch_limit": 1024,
                "patch_limit_on_one_side": 2 * self.vision.position_grid,
                "fixed_output_tokens": None,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
            },
            "image_processor_type": "KimiK3VisionProcessor",
        }

    def _text_config(self) -> dict[str, Any]:
        special = special_token_ids(self.vocab_size)
        mla = [i + 1 for i in range(self.layers) if self.is_mla(i)]
        config: dict[str, Any] = {
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.dense_intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "bos_token_id": special["[BOS]"],
            "eos_token_id": special["[EOS]"],
            "pad_token_id": special["[PAD]"],
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": KV_LORA_RANK,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
            "v_head_dim": self.v_head_dim,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "kda_layers": [i + 1 for i in range(self.layers) if not self.is_mla(i)],
                "full_attn_layers": mla,
                "num_heads": self.heads,
                "head_dim": self.head_dim,
                "short_conv_kernel_size": CONV_WIDTH,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
            "attn_res_block_size": self.attn_res_block_size,
            "num_experts": self.experts,
            "num_experts_per_token": self.experts_per_token,
            "num_shared_experts": self.shared_experts,
            "moe_intermediate_size": self.expert_intermediate_size,
            "routed_expert_hidden_size": self.latent_size,
            "latent_moe_use_norm": True,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
        }
        if self.expert_intermediate_size < 3072:
            # Upstream pads experts to 256 rows a rank for its GPU kernels. Small models would
            # turn into mostly padding, which the CPU experts do not need.
            config["min_moe_intermediate_per_partition"] = GROUP_SIZE
        if self.expert_format is ExpertFormat.MXFP4:
            config["quantization_config"] = quantization_config()
        return config


def special_token_ids(vocab_size: int) -> dict[str, int]:
    """Ids of the special tokens, which end the vocabulary."""
    names = (
        "[BOS]",
        "[EOS]",
        "[PAD]",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "<|end_of_msg|>",
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_pad|>",
        "<|media_end|>",
        "<|kimi_image_placeholder|>",
    )
    return {name: vocab_size - len(names) + i for i, name in enumerate(names)}


def _vision_from_config(config: Mapping[str, Any]) -> VisionSpec:
    defaults = VisionSpec()
    return VisionSpec(
        layers=config.get("vt_num_hidden_layers", defaults.layers),
        hidden_size=config.get("vt_hidden_size", defaults.hidden_size),
        heads=config.get("vt_num_attention_heads", defaults.heads),
        qkv_hidden_size=config.get("qkv_hidden_size", defaults.qkv_hidden_size),
        intermediate_size=config.get("vt_intermediate_size", defaults.intermediate_size),
        patch_size=config.get("patch_size", defaults.patch_size),
        position_grid=config.get("init_pos_emb_height", defaults.position_grid),
        merge=config.get("merge_kernel_size", [defaults.merge])[0],
    )


def _vision_config(vision: VisionSpec, text_hidden_size: int) -> dict[str, Any]:
    return {
        "model_type": "kimi_k3_vision",
        "patch_size": vision.patch_size,
        "init_pos_emb_height": vision.position_grid,
        "init_pos_emb_width": vision.position_grid,
        "init_pos_emb_time": 4,
        "vt_num_attention_heads": vision.heads,
        "vt_num_hidden_layers": vision.layers,
        "vt_hidden_size": vision.hidden_size,
        "vt_intermediate_size": vision.intermediate_size,
        "qkv_hidden_size": vision.qkv_hidden_size,
        "merge_kernel_size": [vision.merge, vision.merge],
        "mm_projector_type": "patchmergerv2",
        "text_hidden_size": text_hidden_size,
    }
