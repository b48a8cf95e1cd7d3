# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""An expert mapping that offers the entries of the tensor at hand first.

Models look for a tensor's entry by trying every one of the mapping's in turn, 2,688 with 896
experts. Here the entries whose checkpoint name occurs in the tensor's name come first. It is an
order, never a choice: every iteration still hands out every entry once, so a tensor's name that is
not known, or not the right one, costs time and changes nothing.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

# (name in the layer, name in the checkpoint, expert id, shard id)
Entry = tuple[str, str, int, str]


class CurrentTensor:
    """Name of the checkpoint tensor that a model is being handed.

    One for the process: vLLM loads one tensor at a time. The threads that read files ahead of it
    do not write here.
    """

    name: str = ""


def note_names(weights: Iterable[Any]) -> Iterator[Any]:
    """Hand on ``(name, tensor, ...)`` items one by one, noting the name of each.

    The name holds until the consumer asks for the next item, so it is the one the consumer works
    on as long as it takes items from here one at a time.
    """
    for item in weights:
        CurrentTensor.name = item[0]
        yield item
        del item
    CurrentTensor.name = ""


class IndexedMapping(list[Entry]):
    """A list of expert mapping entries whose iteration starts with those of the current tensor."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        super().__init__(entries)
        self._indexed = -1
        self._prefix = ""
        self._lengths: list[int] = []
        self._positions: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over all entries, the current tensor's first, otherwise in the list's order."""
        first = self.positions(CurrentTensor.name)
        return self._from(first) if first else super().__iter__()

    def positions(self, name: str) -> list[int]:
        """Return where the entries stand whose checkpoint name occurs in `name`, ascending.

        Empty also when the checkpoint names share no beginning by which to find them.
        """
        if self._indexed != len(self):
            self._build()
        if not self._prefix:
            return []
        start = name.find(self._prefix)
        if start < 0:
            return []
        known, found = self._positions, []
        while start >= 0:
            for length in self._lengths:
                if positions := known.get(name[start : start + length]):
                    found += positions
            start = name.find(self._prefix, start + 1)
        return sorted(set(found)) if len(found) > 1 else found

    def _build(self) -> None:
        self._positions = {}
        for position in range(len(self)):
            self._positions.setdefault(self[position][1], []).append(position)
        self._prefix = os.path.commonprefix(list(self._positions))
        self._lengths = sorted({len(name) for name in self._positions})
        self._indexed = len(self)

    def _from(self, first: list[int]) -> Iterator[Entry]:
        for position in first:
            yield self[position]
        for position in range(len(self)):
            if position not in first:
                yield self[position]
