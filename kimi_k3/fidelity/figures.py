# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What is counted about int4 matrices, and how counts of pieces add up. Knows no tensor."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import add
from typing import Any

CODES = tuple(range(-8, 8))
# bf16's sign and exponent: 2 x 256 kinds of scale.
SIGNS, EXPONENTS = 2, 256
BIAS = 127


@dataclass(frozen=True)
class Group:
    """One group of 32 values and how far it is from its source.

    Attributes:
        error: Squared error over squared value; infinite where zeros became something else.
        tensor: The matrix.
        row: Of the matrix, from 0.
        group: Along the row, from 0: values 32 * group to 32 * group + 31.
        scale: The int4 scale.
    """

    error: float
    tensor: str
    row: int
    group: int
    scale: float

    @property
    def order(self) -> tuple[float, str, int, int]:
        """By which the worst comes first, and equals come in one order."""
        return -self.error, self.tensor, self.row, self.group

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, which knows neither infinity nor NaN."""
        return {
            "relative_squared_error": self.error if math.isfinite(self.error) else None,
            "tensor": self.tensor,
            "row": self.row,
            "group": self.group,
            "scale": self.scale if math.isfinite(self.scale) else None,
        }


def worst(groups: Iterable[Group], count: int) -> list[Group]:
    """Return the groups with the largest errors, the worst first."""
    return heapq.nsmallest(count, groups, key=lambda group: group.order)


@dataclass(frozen=True)
class Figures:
    """Counts over any number of groups; `+` adds them up.

    Attributes:
        matrices: Looked at, in whole or in part.
        groups: Groups of 32 values.
        compared: Groups that were compared with a source. What follows, up to the largest error,
            is about these.
        broken: Groups with a scale on either side that is not finite, or values that are not.
        exact: Groups with every value unchanged, groups of zeros included.
        zero: Groups whose source values are all zero.
        collapsed: Groups with values in the source and only zeros in the result.
        squared_error: Sum over all values.
        squared_value: Sum over all values of the source.
        largest_error: The largest absolute error.
        codes: Count of each code, from -8.
        scales: Count of each sign and exponent of the scale: first 256 positive, then 256 negative.
    """

    matrices: int = 0
    groups: int = 0
    compared: int = 0
    broken: int = 0
    exact: int = 0
    zero: int = 0
    collapsed: int = 0
    squared_error: float = 0.0
    squared_value: float = 0.0
    largest_error: float = 0.0
    codes: tuple[int, ...] = (0,) * len(CODES)
    scales: tuple[int, ...] = (0,) * (SIGNS * EXPONENTS)

    def __add__(self, other: "Figures") -> "Figures":
        """Return the figures of both together."""
        return Figures(
            matrices=self.matrices + other.matrices,
            groups=self.groups + other.groups,
            compared=self.compared + other.compared,
            broken=self.broken + other.broken,
            exact=self.exact + other.exact,
            zero=self.zero + other.zero,
            collapsed=self.collapsed + other.collapsed,
            squared_error=self.squared_error + other.squared_error,
            squared_value=self.squared_value + other.squared_value,
            largest_error=max(self.largest_error, other.largest_error),
            codes=tuple(map(add, self.codes, other.codes)),
            scales=tuple(map(add, self.scales, other.scales)),
        )

    @property
    def relative_squared_error(self) -> float | None:
        """Squared error over squared value; None where nothing was compared."""
        if not self.compared:
            return None
        return self.squared_error / self.squared_value if self.squared_value else 0.0

    @property
    def exact_share(self) -> float | None:
        """Exact groups among those that are not zeros anyway; None where nothing was compared."""
        if not self.compared:
            return None
        filled = self.compared - self.zero
        return (self.exact - self.zero) / filled if filled else 1.0

    @property
    def negative_share(self) -> float:
        """Groups whose scale is negative."""
        return sum(self.scales[EXPONENTS:]) / self.groups if self.groups else 0.0

    @property
    def minus_eight_share(self) -> float:
        """Codes that are -8, which only a scale of the right sign can use."""
        total = sum(self.codes)
        return self.codes[0] / total if total else 0.0

    def code_histogram(self) -> dict[int, int]:
        """Return code -> count."""
        return dict(zip(CODES, self.codes, strict=True))

    def scale_histogram(self) -> dict[int, tuple[int, int]]:
        """Return exponent e of scales in [2^e, 2^(e+1)) -> positive and negative ones."""
        return {
            exponent - BIAS: (self.scales[exponent], self.scales[EXPONENTS + exponent])
            for exponent in range(EXPONENTS)
            if self.scales[exponent] or self.scales[EXPONENTS + exponent]
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        return {
            "matrices": self.matrices,
            "groups": self.groups,
            "compared_groups": self.compared,
            "broken_groups": self.broken,
            "exact_groups": self.exact,
            "zero_groups": self.zero,
            "collapsed_groups": self.collapsed,
            "relative_squared_error": self.relative_squared_error,
            "exact_share": self.exact_share,
            "largest_absolute_error": self.largest_error if self.compared else None,
            "negative_scale_share": self.negative_share,
            "minus_eight_share": self.minus_eight_share,
            "codes": {str(code): count for code, count in self.code_histogram().items()},
            "scales": {
                str(exponent): {"positive": positive, "negative": negative}
                for exponent, (positive, negative) in self.scale_histogram().items()
            },
        }
