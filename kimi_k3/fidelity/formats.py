# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Numbers as text, the same in the tables and on the page."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power(exponent: int) -> str:
    """Return 2 to an integer power."""
    return f"2{str(exponent).translate(_SUPERSCRIPTS)}"


def percent(share: float | None, digits: int = 3) -> str:
    """Return a share as a percentage; a dash for None, "no number" for infinity."""
    if share is None:
        return "-"
    if share == float("inf"):
        return "no number"
    if 0 < share < 0.5 * 10 ** -(digits + 2):
        return f"<{10**-digits:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


def layer_name(layer: int) -> str:
    """Return a layer's index; "outside" for matrices outside of layers (-1)."""
    return str(layer) if layer >= 0 else "outside"


def sampled(share: float) -> str:
    """Say which rows were looked at."""
    return f"{100 * share:.4g} % of each matrix's rows, evenly spread"
