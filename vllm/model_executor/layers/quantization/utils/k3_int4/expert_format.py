# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Whether a checkpoint holds Kimi-K3's experts as packed int4 already, by its config.json.

It reads no tensor. What is not exactly that format is upstream's.
"""

from typing import TYPE_CHECKING, Any

from k3_checkpoint.formats import (
    CONFIG_KEYS,
    INT4_PACKED,
    INT4_WEIGHTS,
    MXFP4_PACKED,
    Format,
    group_format,
)

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

    from vllm.config import ModelConfig
    from vllm.model_executor.layers.fused_moe import RoutedExperts


def is_packed_scheme(
    weights: "QuantizationArgs | None", inputs: "QuantizationArgs | None", form: str | None
) -> bool:
    """Tell whether a scheme is signed int4 codes with one scale per group of 32, packed in int32.

    Args:
        weights: How weights are quantized.
        inputs: How activations are; the experts take none but plain ones.
        form: compressed-tensors' name of the storage format.
    """
    return (
        weights is not None
        and inputs is None
        and form == INT4_PACKED
        and all(getattr(weights, name) == value for name, value in INT4_WEIGHTS.items())
        and not weights.dynamic
        and not weights.actorder
    )


def expert_format(quant_config: Any, layer: "RoutedExperts", layer_name: str) -> Format | None:
    """Return how a layer's SiTU experts are stored: packed int4, MXFP4, or None for all else."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if layer.moe_config.activation != MoEActivation.SITU:
        return None
    # Experts are described as the Linear layers that they are in the checkpoint.
    quant_config._add_fused_moe_to_target_scheme_map()
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    schemes = [quant_config.get_scheme_dict(layer, f"{layer_name}.0.{name}") for name in names]
    if None in schemes:
        return None
    keys = ("weights", "input_activations", "format")
    parts = [tuple(scheme.get(key) for key in keys) for scheme in schemes]
    if all(is_packed_scheme(*part) for part in parts):
        return Format.INT4
    return Format.MXFP4 if all(form == MXFP4_PACKED for *_, form in parts) else None


def description(model: "ModelConfig") -> dict[str, Any]:
    """Return how config.json describes compressed-tensors weights; empty where it does not."""
    for config in (model.hf_config, model.hf_text_config):
        described = getattr(config, CONFIG_KEYS[0], None)
        if isinstance(described, dict):
            return described if described.get("quant_method") == "compressed-tensors" else {}
    return {}


def declared_int4(model: "ModelConfig") -> Format | None:
    """Return INT4 or, with MXFP4 beside it, MIXED if config.json describes packed int4 weights
    that Kimi-K3's experts can be, None otherwise."""
    from compressed_tensors.quantization import QuantizationArgs

    described = description(model)
    groups = described.get("config_groups")
    schemes = [
        (group.get("weights"), group.get("input_activations"), group_format(group, described))
        for group in (groups.values() if isinstance(groups, dict) else ())
    ]
    if not any(
        is_packed_scheme(weights and QuantizationArgs.model_validate(weights), inputs, form)
        for weights, inputs, form in schemes
    ):
        return None
    return Format.MIXED if any(form == MXFP4_PACKED for *_, form in schemes) else Format.INT4
