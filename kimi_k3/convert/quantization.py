# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`quantization_config` of the source judged, and that of the result written.

Everything that config.json says beside it is kept.
"""

import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

from k3_checkpoint.formats import (
    CONFIG_KEYS,
    INT4_PACKED,
    INT4_WEIGHTS,
    MIXED_PRECISION,
    MXFP4_PACKED,
    MXFP4_WEIGHTS,
    OTHER_PACKED,
    descriptions,
    group_format,
)

# May be left out, and then mean the same.
_IMPLIED = frozenset({"strategy", "symmetric"})
# What the source says about its e8m0 scales; the result's are bfloat16, like the model.
_OF_SCALES = ("scale_dtype", "zp_dtype")


def check_config(config: dict[str, Any]) -> Iterator[str]:
    """Yield what keeps a model from being converted, as far as config.json tells."""
    found = list(descriptions(config))
    if not found:
        yield (
            f"no {CONFIG_KEYS[0]}: expected compressed-tensors {MXFP4_PACKED}, found a model that "
            "is not quantized"
        )
    for place, quantization in found:
        for problem in _check_quantization(quantization):
            yield f"{place}: {problem}"


def converted_config(
    config: dict[str, Any], converted: Collection[str], kept: Collection[str]
) -> dict[str, Any]:
    """config.json of the result.

    Args:
        config: The source's, which `check_config` has found nothing wrong with.
        converted: Containers (see `selection.container`) that are int4 in the result. Named in
            targets where there are others, else not used.
        kept: Containers that stay in MXFP4.
    """
    result = copy.deepcopy(config)
    for _, quantization in descriptions(result):
        groups = quantization["config_groups"]
        mxfp4 = {
            name: group
            for name, group in groups.items()
            if group_format(group, quantization) == MXFP4_PACKED
        }
        if kept:
            # A target that is a name or a pattern comes before one that is a class ("Linear").
            first = copy.deepcopy(next(iter(mxfp4.values())))
            first["targets"] = [target(name) for name in sorted(converted)]
            _make_int4(first)
            for group in mxfp4.values():
                group["format"] = MXFP4_PACKED
            name = "int4"
            while name in groups:
                name += "_"
            quantization["config_groups"] = {name: first, **groups}
        else:
            for group in mxfp4.values():
                _make_int4(group)
        formats = {g.get("format") for g in quantization["config_groups"].values()}
        quantization["format"] = INT4_PACKED if formats == {INT4_PACKED} else MIXED_PRECISION
    return result


def target(container: str) -> str:
    """The entry of a group's targets that means a container's modules and no others."""
    if not container.endswith(".experts"):
        return container
    return f"re:^{re.escape(container)}\\.\\d+\\..*"


def _make_int4(group: dict[str, Any]) -> None:
    weights = {k: v for k, v in group["weights"].items() if k not in _OF_SCALES}
    group["weights"] = weights | INT4_WEIGHTS | {"dynamic": False}
    group["format"] = INT4_PACKED
    # Nothing quantizes activations for int4 weights with groups of 32.
    group["input_activations"] = None


def _check_quantization(quantization: Any) -> Iterator[str]:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method != "compressed-tensors":
        yield f"quant_method: expected compressed-tensors ({MXFP4_PACKED}), found {method!r}"
        return
    format_ = quantization.get("format")
    groups = quantization.get("config_groups")
    if format_ == INT4_PACKED:
        yield f"format: found {INT4_PACKED}: the checkpoint holds integers already"
        return
    if format_ not in (MXFP4_PACKED, MIXED_PRECISION):
        yield f"format: expected {MXFP4_PACKED}, found {format_!r}"
        return
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        yield f"config_groups: expected groups by name, found {groups!r}"
        return
    seen = 0
    for name, group in groups.items():
        own = group.get("format") or format_
        if own in OTHER_PACKED:
            yield f"config_groups.{name}: {own} beside {MXFP4_PACKED} is not supported"
        if group_format(group, quantization) != MXFP4_PACKED:
            continue
        seen += 1
        weights, targets = group.get("weights"), group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            yield f"config_groups.{name}.targets: expected a list of names, found {targets!r}"
        if not isinstance(weights, dict):
            yield f"config_groups.{name}.weights: expected an object, found {weights!r}"
            continue
        for key, expected in MXFP4_WEIGHTS.items():
            value = weights.get(key)
            if value != expected and not (value is None and key in _IMPLIED):
                yield f"config_groups.{name}.weights.{key}: expected {expected!r}, found {value!r}"
    if not seen:
        yield f"config_groups: no group in {MXFP4_PACKED}"
