# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Whether Kimi-K3's experts are to become int4, by which rule, and every reason why they cannot.

Reads a configuration and asks the platform. It touches no weight, and without the flag it decides
nothing: no platform, GPU or model is converted unless somebody asked for it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mxfp4_int4.layouts import SCALE_RULES, ScaleRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig

FLAG = "--quantization-config.moe.weight int4_per_group_32"
RULE_KEY = "kimi_k3_int4_scale_rule"
RULE_VARIABLE = "VLLM_KIMI_K3_INT4_SCALE_RULE"
DEFAULT_RULE: ScaleRule = "mse"

ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "KimiK3MTPModel")
GROUP = 32
# AITER reads the scales of two neighbouring groups along K as one word.
GROUP_PAIR = 2 * GROUP
# AITER's packed-int4 kernels. Stage 1 walks K = hidden in tiles of 256 or 128 and needs
# 2 * intermediate % 256 == 0; stage 2 walks K = intermediate and writes hidden in tiles of 128.
AITER_TILE = 128

_spared: ContextVar[bool] = ContextVar("kimi_k3_int4_spared", default=False)


@dataclass(frozen=True)
class Request:
    """What asks for int4 experts.

    Attributes:
        what: as a refusal names it.
        fallback: what to do where int4 experts cannot be, as a sentence without its end.
    """

    what: str
    fallback: str


BY_FLAG = Request(FLAG, "Start without the flag")
BY_CHECKPOINT = Request(
    "the checkpoint of packed int4 experts", "Serve the MXFP4 checkpoint that it was made from"
)


class Int4RefusedError(ValueError):
    """Int4 experts were asked for and cannot be. The message says what was found, what is needed
    and what to do."""

    def __init__(self, found: str, needed: str, remedy: str, asked: Request = BY_FLAG) -> None:
        super().__init__(f"{asked.what} is refused: found {found}; needed: {needed}. {remedy}")


class Target(StrEnum):
    """Where int4 experts are computed."""

    CPU = "cpu"
    GFX942 = "gfx942"


def is_requested(vllm_config: "VllmConfig | None") -> bool:
    """Tell whether the flag was given for the model of this configuration."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32

    args = getattr(getattr(vllm_config, "model_config", None), "quantization_config", None)
    weight = getattr(getattr(args, "moe", None), "weight", None)
    return weight is not None and weight == kInt4Static32


@contextmanager
def spared() -> Iterator[None]:
    """Within the context a layer is built that the user's ignore list keeps in MXFP4."""
    token = _spared.set(True)
    try:
        yield
    finally:
        _spared.reset(token)


def is_spared() -> bool:
    """Tell whether the layer that is being built keeps its MXFP4 weights."""
    return _spared.get()


def is_ignored(vllm_config: "VllmConfig | None", layer: str) -> bool:
    """Tell whether the ignore list beside the flag names this layer."""
    if not is_requested(vllm_config):
        return False
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer,
    )

    ignore = vllm_config.model_config.quantization_config.ignore  # type: ignore[union-attr]
    return bool(ignore) and should_ignore_layer(layer, ignore=ignore, use_fnmatch=True)


def scale_rule(vllm_config: "VllmConfig") -> ScaleRule:
    """Return the scale rule that `additional_config` or the environment asks for, "mse" by default.

    Raises:
        Int4RefusedError: The name is unknown, or the two ask for different rules.
    """
    additional = vllm_config.additional_config
    found: dict[str, Any] = {
        f"additional_config[{RULE_KEY!r}]": (
            additional.get(RULE_KEY) if isinstance(additional, Mapping) else None
        ),
        RULE_VARIABLE: os.environ.get(RULE_VARIABLE),
    }
    asked = {place: rule for place, rule in found.items() if rule is not None}
    for place, rule in asked.items():
        if rule not in SCALE_RULES:
            raise Int4RefusedError(
                f"{place} = {rule!r}",
                f"one of {', '.join(SCALE_RULES)}",
                f'Leave it out for "{DEFAULT_RULE}", the more exact rule.',
            )
    if len(set(asked.values())) > 1:
        raise Int4RefusedError(
            " but ".join(f"{place} = {rule!r}" for place, rule in asked.items()),
            "one scale rule",
            "Set one of the two.",
        )
    return next(iter(asked.values()), DEFAULT_RULE)


def check_config(vllm_config: "VllmConfig") -> None:
    """Refuse, before an engine starts, a flag that could not be honoured, whatever the model.

    Without the flag, a checkpoint of packed int4 experts is looked at instead.

    Args:
        vllm_config: the scale rule is written to its `additional_config`, so that workers on other
            hosts, with another environment, use the same one.

    Raises:
        Int4RefusedError: see docs/int4.md for all reasons.
    """
    from vllm.model_executor.layers.quantization.utils.k3_int4 import checkpoint

    if not is_requested(vllm_config):
        checkpoint.check_config(vllm_config)
        return
    rule = scale_rule(vllm_config)
    _check_model(vllm_config)
    _check_ignore_list(vllm_config)
    find_target()
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[RULE_KEY] = rule


def _check_model(vllm_config: "VllmConfig") -> None:
    from vllm.model_executor.layers.quantization.utils.k3_int4 import checkpoint

    model = vllm_config.model_config
    architecture = model.architecture
    without = "Start without the flag."
    if architecture not in ARCHITECTURES:
        raise Int4RefusedError(
            f"the model {architecture}",
            f"Kimi-K3 ({', '.join(ARCHITECTURES)}), the only model whose experts it converts",
            without,
        )
    if checkpoint.is_packed(model):
        raise Int4RefusedError(
            "a checkpoint whose experts are int4 already (pack-quantized, groups of 32)",
            "routed experts in MXFP4, which the flag converts",
            f"{BY_FLAG.fallback}: the checkpoint is served as it is, with the scales it holds.",
        )
    if model.quantization != "mxfp4":
        found = model.quantization or "unquantized weights"
        raise Int4RefusedError(
            f"a checkpoint with {found}",
            "routed experts in MXFP4 (format mxfp4-pack-quantized)",
            f"There is nothing to convert. {without}",
        )
    text = model.hf_text_config
    if text.hidden_act != "situ":
        raise Int4RefusedError(f"hidden_act {text.hidden_act!r}", "hidden_act 'situ'", without)
    activation = model.quantization_config.moe.activation
    if activation is not None:
        raise Int4RefusedError(
            f"a moe.activation override ({activation})",
            "bfloat16 activations, the only ones that the int4 experts take",
            "Leave moe.activation out.",
        )


def moe_layer_names(architecture: str, text: Any) -> list[str]:
    """Names, inside the engine, of the routed experts of a Kimi-K3 text configuration."""
    prefix = "language_model." if architecture == "KimiK3ForConditionalGeneration" else ""
    return [
        f"{prefix}model.layers.{layer}.block_sparse_moe.experts"
        for layer in range(text.num_hidden_layers)
        if layer >= text.first_k_dense_replace and layer % text.moe_layer_freq == 0
    ]


def _check_ignore_list(vllm_config: "VllmConfig") -> None:
    model = vllm_config.model_config
    names = moe_layer_names(model.architecture, model.hf_text_config)
    if not names:
        raise Int4RefusedError(
            "a model without MoE layers", "at least one", "Start without the flag."
        )
    if all(is_ignored(vllm_config, name) for name in names):
        raise Int4RefusedError(
            f"an ignore list, {model.quantization_config.ignore}, that holds all {len(names)} MoE "
            f"layers ({names[0]} to {names[-1]})",
            "at least one MoE layer to convert",
            "Name only the layers that are to stay in MXFP4, or start without the flag.",
        )


def find_target() -> Target:
    """Return where int4 experts will be computed on this machine.

    Raises:
        Int4RefusedError: Nowhere.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Target.CPU
    needed = "a gfx942 GPU (MI300X, MI308X, MI325X) with AITER, or the CPU platform"
    if not current_platform.is_rocm():
        raise Int4RefusedError(
            f"the platform {current_platform.device_name}",
            needed,
            "Start without the flag: the experts are then served in MXFP4 where the platform can.",
        )
    from vllm.platforms import rocm

    if not rocm.on_gfx942():
        raise Int4RefusedError(
            f"the GPU {getattr(rocm, '_GCN_ARCH', 'of another architecture')}",
            needed,
            "Start without the flag: gfx950 computes MXFP4 itself, and int4 would only lose.",
        )
    from vllm.model_executor.layers.quantization.utils.k3_int4.aiter import check_enabled

    check_enabled()
    return Target.GFX942


def check_layer(moe: "FusedMoEConfig", target: Target, asked: Request = BY_FLAG) -> None:
    """Refuse a MoE layer that the int4 experts cannot compute, before it has any weight.

    Raises:
        Int4RefusedError: Its activation, SiTU's constants, its kernel choice or its sizes.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if moe.activation != MoEActivation.SITU:
        raise Int4RefusedError(
            f"experts with the activation {moe.activation.value}",
            "SiTU, Kimi-K3's activation",
            f"{asked.fallback}.",
            asked,
        )
    for name in ("activation_situ_beta", "activation_situ_linear_beta"):
        if getattr(moe, name) is None:
            raise Int4RefusedError(
                f"no {name} in the model's config.json",
                "both SiTU constants (Kimi-K3: 4.0 and 25.0)",
                "Take config.json from the model's own repository.",
                asked,
            )
    backends = ("auto", "cpu" if target is Target.CPU else "aiter")
    if moe.moe_backend not in backends:
        raise Int4RefusedError(
            f"--moe-backend {moe.moe_backend}",
            f"one of {', '.join(backends)}",
            "Leave --moe-backend out.",
            asked,
        )
    inner, hidden = moe.intermediate_size_per_partition, moe.hidden_dim
    if inner % GROUP:
        raise Int4RefusedError(
            f"an intermediate size of {inner} per rank",
            f"a multiple of {GROUP}: a group of {GROUP} values has one scale and cannot be split",
            "Use fewer tensor-parallel ranks or --enable-expert-parallel.",
            asked,
        )
    if hidden % GROUP_PAIR:
        raise Int4RefusedError(
            f"a (latent) hidden size of {hidden}",
            f"a multiple of {GROUP_PAIR}: the kernel reads two groups of {GROUP} at a time",
            f"{asked.fallback}.",
            asked,
        )


def native_sizes(hidden: int, inner: int, target: Target) -> tuple[int, int] | None:
    """Return the sizes of the weights where int4 experts need no other rounding, else None.

    Kimi-K3's own 384 a rank at TP8 stays 384: rounded up to 512 it would cost a third more memory.

    Args:
        hidden: K of stage 1.
        inner: intermediate size per rank, K of stage 2.
        target: decides what the layout or the kernel needs.
    """
    if target is Target.CPU:
        return hidden, -(-inner // GROUP_PAIR) * GROUP_PAIR
    if hidden % AITER_TILE == 0 and inner % AITER_TILE == 0:
        return hidden, inner
    return None
