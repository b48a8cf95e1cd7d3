# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Whether a checkpoint holds Kimi-K3's experts as packed int4 already, and who computes them here.

It tells a format from config.json and asks the platform; it reads no tensor. What is not exactly
that format, and what another GPU serves, is upstream's.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm.model_executor.layers.quantization.utils.k3_int4.policy import (
    ARCHITECTURES,
    BY_CHECKPOINT,
    GROUP,
    Int4RefusedError,
    Target,
)

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

INT4_FORMAT = "pack-quantized"
MXFP4_FORMAT = "mxfp4-pack-quantized"


def is_packed_scheme(
    weights: "QuantizationArgs | None", inputs: "QuantizationArgs | None", form: str | None
) -> bool:
    """Tell whether a scheme is signed int4 codes with one scale per group of 32, packed in int32.

    Args:
        weights: how weights are quantized.
        inputs: how activations are; the experts take none but plain ones.
        form: compressed-tensors' name of the storage format.
    """
    return (
        weights is not None
        and inputs is None
        and form == INT4_FORMAT
        and (weights.num_bits, weights.type, weights.strategy) == (4, "int", "group")
        and weights.group_size == GROUP
        and bool(weights.symmetric)
        and not weights.dynamic
        and not weights.actorder
    )


def expert_format(
    quant_config: "CompressedTensorsConfig", layer: "RoutedExperts", layer_name: str
) -> str | None:
    """Return how a layer's SiTU experts are stored: packed int4, MXFP4, or None for all else."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if layer.moe_config.activation != MoEActivation.SITU:
        return None
    # Experts are described as the Linear layers that they are in the checkpoint.
    quant_config._add_fused_moe_to_target_scheme_map()
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    schemes = [quant_config.get_scheme_dict(layer, f"{layer_name}.0.{name}") for name in names]
    parts = [
        (scheme.get("weights"), scheme.get("input_activations"), scheme.get("format"))
        for scheme in schemes
        if scheme is not None
    ]
    if len(parts) < len(names):
        return None
    if all(is_packed_scheme(*part) for part in parts):
        return INT4_FORMAT
    return MXFP4_FORMAT if all(form == MXFP4_FORMAT for *_, form in parts) else None


def find_target(moe_backend: str) -> Target | None:
    """Return where this project's experts compute packed int4, None where upstream's do.

    Args:
        moe_backend: `--moe-backend`; one that is not this project's is upstream's to serve.

    Raises:
        Int4RefusedError: gfx942 without AITER's fused MoE, where upstream would expand the experts
            to four times their memory; gfx950 with a backend that would compute SiLU.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Target.CPU if moe_backend in ("auto", "cpu") else None
    if not current_platform.is_rocm():
        return None
    from vllm.platforms.rocm import on_gfx942, on_gfx950

    if on_gfx950() and moe_backend == "flydsl":
        raise Int4RefusedError(
            "--moe-backend flydsl",
            "a kernel that computes SiTU: vLLM calls this one for SiLU, whatever the model wants",
            "Leave --moe-backend out.",
            BY_CHECKPOINT,
        )
    if not on_gfx942() or moe_backend not in ("auto", "aiter"):
        return None
    from vllm.model_executor.layers.quantization.utils.k3_int4.aiter import check_enabled

    check_enabled(BY_CHECKPOINT)
    return Target.GFX942


def is_packed(model: "ModelConfig") -> bool:
    """Tell whether config.json describes packed int4 weights that Kimi-K3's experts can be."""
    from compressed_tensors.quantization import QuantizationArgs

    return any(
        is_packed_scheme(
            group.get("weights") and QuantizationArgs.model_validate(group["weights"]),
            group.get("input_activations"),
            form,
        )
        for group, form in _groups(model)
    )


def _groups(model: "ModelConfig") -> Iterator[tuple[dict[str, Any], str | None]]:
    """Groups of layers that config.json describes, and each one's storage format."""
    for name in ("hf_config", "hf_text_config"):
        described = getattr(getattr(model, name, None), "quantization_config", None)
        if not isinstance(described, dict):
            continue
        groups = described.get("config_groups")
        if described.get("quant_method") == "compressed-tensors" and isinstance(groups, dict):
            for group in groups.values():
                yield group, group.get("format") or described.get("format")
        return


def check_config(vllm_config: "VllmConfig") -> None:
    """Refuse, before an engine starts, a packed checkpoint that this machine could not serve.

    Raises:
        Int4RefusedError: On gfx942: AITER's fused MoE is not there, activations are not bfloat16,
            or some experts are still MXFP4.
    """
    model = vllm_config.model_config
    if getattr(model, "architecture", None) not in ARCHITECTURES or not is_packed(model):
        return
    if find_target(vllm_config.kernel_config.moe_backend) is not Target.GFX942:
        return
    if model.dtype != torch.bfloat16:
        raise Int4RefusedError(
            f"activations in {model.dtype}",
            "bfloat16, the only ones that AITER's int4 kernels take",
            "Leave --dtype out, or give bfloat16.",
            BY_CHECKPOINT,
        )
    if any(form == MXFP4_FORMAT for _, form in _groups(model)):
        raise Int4RefusedError(
            "experts in MXFP4 beside those in int4",
            "int4 throughout: gfx942 has no kernel for SiTU with MXFP4",
            "Convert the checkpoint without --include and --exclude.",
            BY_CHECKPOINT,
        )
