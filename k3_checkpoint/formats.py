# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How weights are quantized and stored: the formats' names, and their description in config.json.

The description is compressed-tensors' `quantization_config`. Imports neither torch nor vLLM.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from mxfp4_int4 import GROUP_SIZE

# compressed-tensors' names of storage formats.
MXFP4_PACKED = "mxfp4-pack-quantized"
INT4_PACKED = "pack-quantized"
MIXED_PRECISION = "mixed-precision"
# Formats that store a weight under the same name as MXFP4, so that it could not be told apart.
OTHER_PACKED = frozenset({INT4_PACKED, "nvfp4-pack-quantized", "marlin-24"})

# Where config.json describes a quantization. The second is an older name, which readers still know.
CONFIG_KEYS = ("quantization_config", "compression_config")

# Last parts of the names of a quantized module's tensors.
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"

MXFP4_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": GROUP_SIZE,
    "symmetric": True,
}
INT4_WEIGHTS: dict[str, Any] = {**MXFP4_WEIGHTS, "type": "int"}

# Everything but the routed experts is left unquantized.
IGNORED_LAYERS = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*routed_expert_(down|up)_proj.*",
    "re:.*_res_proj.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)


class Format(StrEnum):
    """How a checkpoint stores routed experts."""

    MXFP4 = "MXFP4"
    INT4 = "int4"
    MIXED = "MXFP4 and int4"
    PLAIN = "unquantized"
    OTHER = "of another format"


def quantization_config() -> dict[str, Any]:
    """Compressed-tensors description of MXFP4 routed experts."""
    return {
        "quant_method": "compressed-tensors",
        "format": MXFP4_PACKED,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": MXFP4_PACKED,
                "input_activations": None,
                "output_activations": None,
                "weights": {**MXFP4_WEIGHTS, "dynamic": False, "scale_dtype": "torch.uint8"},
            }
        },
        "ignore": list(IGNORED_LAYERS),
    }


def descriptions(config: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every description of a quantization in config.json with its place, at any depth."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name not in CONFIG_KEYS:
                yield from descriptions(value, f"{place}{name}.")
            elif value is not None:
                yield f"{place}{name}", value
    elif isinstance(config, list):
        for i, value in enumerate(config):
            yield from descriptions(value, f"{place}{i}.")


def group_format(group: Mapping[str, Any], description: Mapping[str, Any]) -> Any:
    """Return the storage format of a group: its own, or else the whole description's."""
    return group.get("format") or description.get("format")


def text_quantization(config: Mapping[str, Any]) -> Any:
    """Return the description that holds for the text model; None where it is not quantized."""
    text = config.get("text_config", config)
    return text.get(CONFIG_KEYS[0]) or config.get(CONFIG_KEYS[0]) or None


def declared_format(config: Mapping[str, Any]) -> Format:
    """Return the format of routed experts that config.json, full or text-only, names."""
    description = text_quantization(config)
    if description is None:
        return Format.PLAIN
    if not isinstance(description, Mapping):
        return Format.OTHER
    if description.get("format") == MXFP4_PACKED:
        return Format.MXFP4
    groups = description.get("config_groups")
    formats = {
        _declared(group if isinstance(group, Mapping) else {}, description)
        for group in (groups.values() if isinstance(groups, Mapping) else ())
    }
    if formats == {Format.MXFP4, Format.INT4}:
        return Format.MIXED
    return formats.pop() if len(formats) == 1 else Format.OTHER


def stored_format(dtype: str) -> Format:
    """Return the format that a routed expert's weight has, by its dtype in the shard's header."""
    plain = Format.PLAIN if dtype in ("BF16", "F16", "F32") else Format.OTHER
    return {"U8": Format.MXFP4, "I32": Format.INT4}.get(dtype, plain)


def _declared(group: Mapping[str, Any], description: Mapping[str, Any]) -> Format:
    named, weights = group_format(group, description), group.get("weights")
    if named == MXFP4_PACKED:
        return Format.MXFP4
    if named != INT4_PACKED or not isinstance(weights, Mapping):
        return Format.OTHER
    scheme = ("num_bits", "type", "group_size")
    same = all(weights.get(key) == INT4_WEIGHTS[key] for key in scheme)
    return Format.INT4 if same else Format.OTHER
