# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Bytes for people to read: one unit for a column of a table, or the one that fits a number."""

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class Unit:
    """The unit of a column, chosen so that its largest number has digits before the point.

    Args:
        largest: The column's largest number of bytes.
        top: The largest unit to use.
    """

    def __init__(self, largest: float, top: str = "GiB") -> None:
        allowed = _UNITS[[name for _, name in _UNITS].index(top) :]
        self.size, self.name = next(
            (unit for unit in allowed if abs(largest) >= unit[0]), allowed[-1]
        )

    def format(self, nbytes: float, digits: int = 2) -> str:
        """Return the number without its unit; what is not zero never reads as zero."""
        if self.size == 1 or not nbytes:
            return f"{nbytes:.0f}"
        if abs(nbytes) < self.size * 0.5 * 10**-digits:
            return f"<{10**-digits:.{digits}f}"
        return f"{nbytes / self.size:.{digits}f}"


def size(nbytes: float, digits: int = 2) -> str:
    """Return a number of bytes with the unit that fits it, such as ``187.13 GiB``."""
    unit = Unit(nbytes, top="TiB")
    return f"{unit.format(nbytes, digits)} {unit.name}"
