# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Layouts and scale rules by name, and what is refused of options and values. Without torch."""

from typing import Literal, get_args

from .definition import GROUP_SIZE
from .errors import ConversionInputError

Layout = Literal["aiter", "pack_quantized", "plain"]
ScaleRule = Literal["mse", "absmax"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
SCALE_RULES: tuple[str, ...] = get_args(ScaleRule)


def check_layout(layout: str) -> None:
    """Raises ConversionInputError."""
    if layout not in LAYOUTS:
        raise ConversionInputError(f"layout: expected one of {LAYOUTS}, received {layout!r}")


def check_scale_rule(scale_rule: str) -> None:
    """Raises ConversionInputError."""
    if scale_rule not in SCALE_RULES:
        raise ConversionInputError(
            f"scale_rule: expected one of {SCALE_RULES}, received {scale_rule!r}"
        )


def check_options(layout: str, scale_rule: str, chunk_experts: int, in_place: bool) -> None:
    """Options alone, and against each other. Raises ConversionInputError."""
    check_layout(layout)
    check_scale_rule(scale_rule)
    if isinstance(chunk_experts, bool) or not isinstance(chunk_experts, int) or chunk_experts < 1:
        raise ConversionInputError(
            f"chunk_experts: expected an integer of 1 or more, received {chunk_experts!r}"
        )
    if in_place and layout == "plain":
        raise ConversionInputError(
            'in_place: layout "plain" takes a byte a value, twice the MXFP4 bytes, and does not '
            "fit their storage; use in_place=False or a packed layout"
        )


def value_error(expert: int, row: int, group: int, byte: int, count: int) -> ConversionInputError:
    """The error for `count` groups that no output holds, of which the first is at this place."""
    why = (
        "is NaN"
        if byte == 255
        else f"makes values of 2^128 or more (2^{byte - 127} times a code up to 6.0), which "
        "bfloat16 cannot hold"
    )
    return ConversionInputError(
        f"expert {expert}, row {row}, group {group} (values {group * GROUP_SIZE} to "
        f"{(group + 1) * GROUP_SIZE - 1} along K): scale byte {byte} {why}; {count} such "
        f"group{'s' if count != 1 else ''} in all. Expected bytes 0..254 and finite values: the "
        "checkpoint is damaged or not MXFP4. Nothing was written."
    )
