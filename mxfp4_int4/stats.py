# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How far converted experts are from their MXFP4 values: exact sums, mergeable in any order.

Sums are kept as integers per scale byte and turned into floats only when asked for, so that merged
figures do not depend on chunks, ranks or devices. Never part of the conversion itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import torch

from .definition import GROUP_SIZE
from .layouts import gather_scales, unpack_codes
from .naive import unpack_values

BYTES = 256
# Errors are counted in half units / 1024: the finest step a scale of either rule needs ("absmax"
# stores 146/1024 half units for a group whose largest code is 0.5).
FRACTION_BITS = 10
_NONE = (0,) * BYTES
# Groups compared at a time. On a CPU so few that torch uses one thread for an operation: many small
# parallel ones take far longer where other work has the cores.
PIECE = {"cpu": 1024, "cuda": 65536}


def _per_byte(what: str) -> tuple[int, ...]:
    return field(default=_NONE, repr=False, metadata={"what": what})


@dataclass(frozen=True)
class ConversionStats:
    """Error of a conversion against the MXFP4 values, over any number of groups of 32.

    groups, exact_groups (every value unchanged), zero_groups (all values zero; also exact),
    collapsed_groups (values, yet only zero codes), negative_scales (groups whose scale is
    negative), minus_eights (groups that use code -8): counts of groups.
    squared_error, squared_value: sums per scale byte b, in (2^(b-138))^2; largest_error: largest
    per scale byte, in 2^(b-138).
    """

    groups: int = 0
    exact_groups: int = 0
    zero_groups: int = 0
    collapsed_groups: int = 0
    negative_scales: int = 0
    minus_eights: int = 0
    squared_error: tuple[int, ...] = _per_byte("sum")
    squared_value: tuple[int, ...] = _per_byte("sum")
    largest_error: tuple[int, ...] = _per_byte("max")

    @property
    def relative_squared_error(self) -> float:
        """Sum of squared errors over the sum of squared MXFP4 values; 0.0 where all are zero."""
        error = sum(v << (2 * b) for b, v in enumerate(self.squared_error))
        value = sum(v << (2 * b) for b, v in enumerate(self.squared_value))
        return error / value if value else 0.0

    @property
    def max_abs_error(self) -> float:
        """The largest |converted - MXFP4 value|, in the weight's own unit."""
        top = 127 + 1 + FRACTION_BITS
        return max(v * 2.0 ** (b - top) for b, v in enumerate(self.largest_error))

    @property
    def exact_share(self) -> float:
        """Share of groups that came out exact; 1.0 where there are none."""
        return self.exact_groups / self.groups if self.groups else 1.0

    def merge(self, *others: "ConversionStats") -> "ConversionStats":
        """The statistics of all groups together (chunks, layers, ranks), in any order."""
        every = (self, *others)
        merged: dict[str, int | tuple[int, ...]] = {}
        for item in fields(self):
            values = [getattr(one, item.name) for one in every]
            if item.metadata:
                unite = max if item.metadata["what"] == "max" else _total
                merged[item.name] = tuple(unite(column) for column in zip(*values, strict=True))
            else:
                merged[item.name] = sum(values)
        return ConversionStats(**merged)  # type: ignore[arg-type]

    def __add__(self, other: object) -> "ConversionStats":
        return self.merge(other) if isinstance(other, ConversionStats) else NotImplemented

    def __radd__(self, other: object) -> "ConversionStats":
        return self if other == 0 else NotImplemented


def _total(values: Iterable[int]) -> int:
    return sum(values)


def measure(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    out_weight: torch.Tensor,
    out_bits: torch.Tensor,
) -> ConversionStats:
    """Compare a converted slab with its source.

    weight uint8 [E, N, K/2], scale uint8 [E, N, G]; out_weight and out_bits (int16, bf16 bits) in
    `layout`, as `layouts` says. Takes 34 bytes a group while it works, and a kilobyte for each of
    a piece of PIECE groups.
    """
    shape = (weight.shape[0], weight.shape[1], 2 * weight.shape[2])
    packed = weight.reshape(-1, GROUP_SIZE // 2)
    byte = scale.reshape(-1)
    codes = unpack_codes(out_weight, layout, shape).reshape(-1, GROUP_SIZE)
    bits = gather_scales(out_bits, layout, shape).reshape(-1)

    counts = torch.zeros(5, dtype=torch.long, device=weight.device)
    sums = torch.zeros((3, BYTES), dtype=torch.long, device=weight.device)
    size = PIECE[weight.device.type]
    for start in range(0, len(byte), size):
        part = slice(start, start + size)
        _measure_piece(
            packed[part], byte[part].long(), codes[part], bits[part].long(), counts, sums
        )
    exact, zero, collapsed, negative, eights = counts.tolist()
    squared_error, squared_value, largest_error = (tuple(row) for row in sums.tolist())
    return ConversionStats(
        groups=len(byte),
        exact_groups=exact,
        zero_groups=zero,
        collapsed_groups=collapsed,
        negative_scales=negative,
        minus_eights=eights,
        squared_error=squared_error,
        squared_value=squared_value,
        largest_error=largest_error,
    )


def _measure_piece(
    packed: torch.Tensor,
    byte: torch.Tensor,
    codes: torch.Tensor,
    bits: torch.Tensor,
    counts: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Add groups (uint8 [R, 16], int64 [R], int8 [R, 32], int64 [R]) to the counts and sums."""
    exponent = (bits >> 7) & 255
    significand = (bits & 127) + 128 * (exponent > 0)
    # In half units / 1024 the scale is significand << (max(exponent, 1) + 4 - byte). A scale so
    # large that the shift is cut, or so small that it is negative, belongs to codes all zero.
    shift = (exponent.clamp(min=1) - 6 + FRACTION_BITS - byte).clamp(0, 24)
    steps = torch.where(bits & 0x8000 != 0, -1, 1) * (significand << shift)
    values = unpack_values(packed)
    squares = values.square().sum(-1) << (2 * FRACTION_BITS)
    error = (values << FRACTION_BITS).sub_(codes * steps[:, None])
    largest = error.abs().amax(-1)
    squared = error.square_().sum(-1)

    exact, zero, unused = largest == 0, squares == 0, (codes == 0).all(-1)
    flags = (exact, zero, unused & ~zero, steps < 0, (codes == -8).any(-1))
    counts.add_(torch.stack([flag.sum() for flag in flags]))
    sums[0].index_add_(0, byte, squared)
    sums[1].index_add_(0, byte, squares)
    sums[2].scatter_reduce_(0, byte, largest, "amax")
