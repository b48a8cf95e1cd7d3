# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the engine knows when `policy` is to decide: who asks for int4 experts, of which model,
where, and by which scale rule. Gathers and asks; touches no weight."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import TYPE_CHECKING, Any

from k3_checkpoint.formats import IGNORED_LAYERS
from mxfp4_int4.layouts import SCALE_RULES, ScaleRule
from vllm.model_executor.layers.quantization.utils.k3_int4 import aiter, expert_format
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import (
    ARCHITECTURES,
    BY_CHECKPOINT,
    BY_FLAG,
    Facts,
    Int4RefusedError,
    Layer,
    Machine,
    Model,
    Platform,
    Refusal,
    Request,
    Target,
    decide,
)
from vllm_overlay import OverlayMismatchError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig

RULE_KEY = "kimi_k3_int4_scale_rule"
RULE_VARIABLE = "VLLM_KIMI_K3_INT4_SCALE_RULE"
DEFAULT_RULE: ScaleRule = "mse"

# What asks for the layer that is being built, where it is not the flag. The tuple holds it.
_building: ContextVar[tuple[Request | None] | None] = ContextVar("kimi_k3_int4", default=None)


@contextmanager
def building(asked: Request | None) -> Iterator[None]:
    """Within the context a layer is built because of `asked`; None keeps its MXFP4 weights."""
    token = _building.set((asked,))
    try:
        yield
    finally:
        _building.reset(token)


def current_request() -> Request | None:
    """Return what asks for int4 experts in the layer that is being built."""
    from vllm.config import get_current_vllm_config_or_none

    held = _building.get()
    if held is not None:
        return held[0]
    return BY_FLAG if is_requested(get_current_vllm_config_or_none()) else None


def is_requested(vllm_config: "VllmConfig | None") -> bool:
    """Tell whether the flag was given for the model of this configuration.

    Raises:
        OverlayMismatchError: The installed vLLM keeps the flag elsewhere.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32

    found: Any = vllm_config
    for name in ("model_config", "quantization_config", "moe", "weight"):
        if found is None:
            return False
        try:
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        except (AttributeError, KeyError) as error:
            # Read as "not asked for", a renamed field would make the flag a silent no-op.
            raise OverlayMismatchError(
                type(found).__module__, f"{type(found).__qualname__}.{name}", "the field", "none"
            ) from error
    return bool(found is not None and found == kInt4Static32)


def is_spared(layer: str) -> bool:
    """Tell whether the ignore list beside the flag keeps a layer that is being built in MXFP4."""
    from vllm.config import get_current_vllm_config_or_none

    config: Any = get_current_vllm_config_or_none()
    return is_requested(config) and _names(config.model_config.quantization_config.ignore, layer)


def _names(ignore: list[str], layer: str, *, use_fnmatch: bool = True) -> bool:
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer,
    )

    return bool(ignore) and should_ignore_layer(layer, ignore=ignore, use_fnmatch=use_fnmatch)


def check_config(vllm_config: "VllmConfig") -> None:
    """Refuse, before an engine starts, int4 experts that it could not serve, whatever the model.

    Args:
        vllm_config: The scale rule is written to its `additional_config`, so that workers on other
            hosts, with another environment, use the same one.

    Raises:
        Int4RefusedError: See docs/int4.md for all reasons.
    """
    if vllm_config.model_config is None:
        return
    asked = BY_FLAG if is_requested(vllm_config) else None
    if asked is BY_FLAG:
        _settle_scale_rule(vllm_config)
    elif vllm_config.model_config.architecture not in ARCHITECTURES:
        return
    model = _model(vllm_config)
    if asked is None and model.experts is not None:
        asked = BY_CHECKPOINT
    if asked is not None:
        backend = vllm_config.kernel_config.moe_backend
        decide(Facts(asked, machine(), backend, model)).require()


def check_layer(moe: "FusedMoEConfig", asked: Request) -> Target | None:
    """Return where a layer's int4 experts are computed, before it has any weight.

    Raises:
        Int4RefusedError: Nowhere.
    """
    names = ("activation_situ_beta", "activation_situ_linear_beta")
    layer = Layer(
        moe.activation.value,
        {name: getattr(moe, name) for name in names},
        moe.hidden_dim,
        moe.intermediate_size_per_partition,
    )
    return decide(Facts(asked, machine(inside=True), moe.moe_backend, layer=layer)).require()


def find_packed_target(backend: str) -> Target | None:
    """Return where this project computes packed int4 experts, None where upstream does.

    Args:
        backend: `--moe-backend`; one that is not this project's is upstream's to serve.

    Raises:
        Int4RefusedError: gfx942 without AITER's fused MoE, where upstream would expand the experts
            to four times their memory; gfx950 with a backend that would compute SiLU.
    """
    return decide(Facts(BY_CHECKPOINT, machine(), backend)).require()


def machine(*, inside: bool = False) -> Machine:
    """Return what this process runs on; `inside` imports AITER on gfx942, to look at it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Machine(Platform.CPU)
    if not current_platform.is_rocm():
        return Machine(Platform.OTHER, current_platform.device_name)
    from vllm.platforms import rocm

    if rocm.on_gfx942():
        return Machine(Platform.ROCM, architecture="gfx942", aiter=aiter.look(inside=inside))
    other = getattr(rocm, "_GCN_ARCH", "of another architecture")
    return Machine(Platform.ROCM, architecture="gfx950" if rocm.on_gfx950() else other)


def scale_rule(vllm_config: "VllmConfig") -> ScaleRule:
    """Return the scale rule that a checked configuration carries; "mse" where it carries none."""
    return _choose_rule({RULE_KEY: _additional(vllm_config).get(RULE_KEY)})


def _additional(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    additional = vllm_config.additional_config
    return additional if isinstance(additional, Mapping) else {}


def _settle_scale_rule(vllm_config: "VllmConfig") -> None:
    """Write the rule that `additional_config` or the environment asks for to the former."""
    place = f"additional_config[{RULE_KEY!r}]"
    asked = {place: _additional(vllm_config).get(RULE_KEY)}
    asked[RULE_VARIABLE] = os.environ.get(RULE_VARIABLE) or None
    rule = _choose_rule(asked)
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[RULE_KEY] = rule
    elif rule != DEFAULT_RULE:
        found = f"{RULE_VARIABLE} = {rule!r} and an additional_config that is no dictionary"
        raise Int4RefusedError(
            Refusal(found, "a dictionary, which carries the rule to workers", "Leave one out.")
        )


def _choose_rule(asked: Mapping[str, Any]) -> ScaleRule:
    """Return the one rule that is asked for, by place; None is no rule."""
    rules = {place: rule for place, rule in asked.items() if rule is not None}
    for place, rule in rules.items():
        if rule not in SCALE_RULES:
            raise Int4RefusedError(
                Refusal(
                    f"{place} = {rule!r}",
                    f"one of {', '.join(SCALE_RULES)}",
                    f'Leave it out for "{DEFAULT_RULE}", the more exact rule.',
                )
            )
    if len(set(rules.values())) > 1:
        found = " but ".join(f"{place} = {rule!r}" for place, rule in rules.items())
        raise Int4RefusedError(Refusal(found, "one scale rule", "Set one of the two."))
    return next(iter(rules.values()), DEFAULT_RULE)


def moe_layer_names(architecture: str, text: Any) -> tuple[str, ...]:
    """Names, inside the engine, of the routed experts of a Kimi-K3 text configuration."""
    prefix = "language_model." if architecture == "KimiK3ForConditionalGeneration" else ""
    return tuple(
        f"{prefix}model.layers.{layer}.block_sparse_moe.experts"
        for layer in range(text.num_hidden_layers)
        if layer >= text.first_k_dense_replace and layer % text.moe_layer_freq == 0
    )


def _model(vllm_config: "VllmConfig") -> Model:
    model = vllm_config.model_config
    if model.architecture not in ARCHITECTURES:
        return Model(model.architecture)
    text, args = model.hf_text_config, model.quantization_config
    layers = moe_layer_names(model.architecture, text)
    flagged = is_requested(vllm_config)
    activation = args.moe.activation if flagged else None
    ignore = args.ignore if flagged else []
    return Model(
        model.architecture,
        model.quantization,
        expert_format.declared_int4(model),
        text.hidden_act,
        str(model.dtype),
        activation and str(activation),
        layers,
        tuple(name for name in layers if _names(ignore, name)),
        tuple(ignore),
        _find_unquantized(layers, model) if flagged else None,
    )


def _find_unquantized(layers: tuple[str, ...], model: Any) -> str | None:
    """Return the first routed expert that config.json's own ignore list leaves unquantized."""
    # Kimi-K3's own list has nearly 250,000 names to pass: its patterns are known to touch none.
    listed = expert_format.description(model).get("ignore") or ()
    ignore = [pattern for pattern in listed if pattern not in IGNORED_LAYERS]
    if not ignore:
        return None
    experts = product(layers, range(model.hf_text_config.num_experts), ("w1", "w2", "w3"))
    parts = (f"{layer}.{expert}.{name}" for layer, expert, name in experts)
    names = (name for group in (layers, parts) for name in group)
    return next((name for name in names if _names(ignore, name, use_fnmatch=False)), None)
