# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Alignment rows of a merged projection's parameters, and which checkpoint shards have arrived.

Describes one parameter at a time and never loads, counts or processes weights itself.
"""

from dataclasses import dataclass, field
from typing import cast

import torch

from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

# The e8m0 byte of 2^0 (OCP Microscaling Formats 1.0, section 5.4.1).
_E8M0_ONE = 127


@dataclass
class ShardRecord:
    """What one parameter of the padded projection expects, and what it has seen.

    The record hangs on the parameter as an attribute. vLLM carries a parameter's attributes along
    when it moves it to the meta device, materializes it or restores it for a reload, so one record
    serves the parameter in all its forms.

    Attributes:
        dim: Dimension that holds the output rows, or one entry per shard.
        rows: Alignment rows (or entries) at the end of `dim`; 0 if the parameter has none.
        fill: Their neutral value.
        shards: Shard ids that a checkpoint must bring. ``None`` alone stands for a parameter that
            is not divided: each shard's copy overwrites the whole of it.
        arrived: Ids counted since the parameter was last loaded.
    """

    dim: int
    rows: int
    fill: float
    shards: frozenset[int | None]
    arrived: set[int | None] = field(default_factory=set)

    def note(self, shard_id: int) -> bool:
        """Record an arriving shard; False if it had arrived before and must not count again."""
        key = None if None in self.shards else shard_id
        first = key not in self.arrived
        self.arrived.add(key)
        return first

    def take_missing(self) -> list[int]:
        """Return the ids that did not arrive, and start over for the next load.

        Empty when nothing was counted, as in a load that fills the parameter directly.
        """
        missing = self.shards - self.arrived if self.arrived else frozenset()
        self.arrived.clear()
        return sorted(shard for shard in missing if shard is not None)

    def loadable_numel(self, param: torch.Tensor) -> int:
        """Return how many of the parameter's elements a checkpoint holds."""
        size = param.shape[self.dim]
        return param.numel() // size * (size - self.rows)

    def fill_alignment(self, param: torch.Tensor) -> None:
        """Put the neutral value into the parameter's alignment rows."""
        if not self.rows or param.is_meta:
            return
        data = param.data
        if data.dtype is torch.float8_e8m0fnu:
            data = data.view(torch.uint8)
        data.narrow(self.dim, data.shape[self.dim] - self.rows, self.rows).fill_(self.fill)


def describe(
    layer: torch.nn.Module, name: str, *, local_sizes: list[int], padding: int
) -> ShardRecord:
    """Describe one parameter of a merged projection whose last output partition is alignment.

    Args:
        layer: The projection, its parameters registered.
        name: The parameter's name in it.
        local_sizes: Output rows of each checkpoint shard on this rank, alignment not included.
        padding: Alignment rows that follow them.

    Raises:
        ValueError: The parameter packs several output rows into one element and a shard's rows do
            not fill whole elements, so that no loader could place them.
    """
    param = getattr(layer, name)
    each_shard: frozenset[int | None] = frozenset(range(len(local_sizes)))
    output_dim = getattr(param, "output_dim", None)
    real = sum(local_sizes)
    per_shard_scale = isinstance(param, PerTensorScaleParameter) or (
        getattr(param, "needs_scalar_to_array", False) and output_dim is None
    )
    if per_shard_scale:
        # One entry per merged matrix, the alignment among them.
        rows = param.shape[0] - len(local_sizes)
        return ShardRecord(0, rows, _neutral(layer, name, per_shard=True), each_shard)
    if output_dim is None:
        return ShardRecord(0, 0, 0, frozenset([None]))
    size = param.shape[output_dim]
    rows = 0
    if isinstance(param, BlockQuantScaleParameter):
        block = cast(list[int], layer.weight_block_size)[0]
        rows = size - -(-real // block)
    elif getattr(param, "packed_dim", None) == output_dim:
        factor = param.packed_factor
        if any(local % factor for local in (*local_sizes, padding)):
            raise ValueError(
                f"{getattr(layer, 'prefix', '')}.{name} packs {factor} output rows into one "
                f"element, but this rank's shards have {local_sizes} rows and {padding} alignment "
                f"rows: expected multiples of {factor}. Use a tensor-parallel size that gives "
                "such shards, or leave this projection unquantized."
            )
        rows = padding // factor
    elif size == real + padding:
        rows = padding
    return ShardRecord(output_dim, rows, _neutral(layer, name), each_shard)


def _neutral(layer: torch.nn.Module, name: str, per_shard: bool = False) -> float:
    """Return the value for alignment rows that keeps them zero and can make no NaN.

    Weights are all-zero bits, which is zero in every float format. Their scale is one, so that
    neither a product nor a quotient with it is anything but zero. Two cases differ: integer codes,
    whose zero bits may stand for a non-zero value, need a zero scale; and the one scale per matrix
    of a merged projection, of which vLLM takes the largest, must not become the largest.
    """
    param = getattr(layer, name)
    if "scale" not in name:
        return 0
    if param.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _E8M0_ONE
    if per_shard:
        return torch.finfo(param.dtype).tiny
    integer_codes = any(
        isinstance(other, PackedColumnParameter | PackedvLLMParameter)
        and other.dtype is torch.int32
        for other in layer.parameters(recurse=False)
    )
    return 0 if integer_codes else 1
