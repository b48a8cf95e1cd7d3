# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The source tensors that a load holds back: how many bytes, where, and whether they stay as they
were. Never keeps a tensor alive by itself, and never moves one between devices.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

# Elements along each dimension that stand for a source's contents.
_SAMPLES = 4


class SourceReusedError(RuntimeError):
    """The memory of a source was given to another one, or written to, while it was held."""


@dataclass(slots=True)
class _Storage:
    nbytes: int
    on_host: bool
    holders: int = 0


@dataclass(slots=True, eq=False)
class Source:
    """One held tensor.

    Attributes:
        owner: Layer and parameter that it was given to, for messages.
        tensor: Weak reference to it; whoever buffered it keeps it alive.
        storage: Identity of its storage among the held ones.
        start: Address of its first byte; 0 where it has none (meta, empty).
        version: torch's count of in-place writes when it arrived.
        sample: A few of its bytes when it arrived, on its own device; None on the meta device.
    """

    owner: str
    tensor: ref[torch.Tensor]
    storage: int
    start: int
    version: int
    sample: torch.Tensor | None


@dataclass(slots=True)
class _Region:
    """Memory up to `end` that held sources cover without a gap."""

    end: int
    sources: set[Source] = field(default_factory=set)


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_meta:
        return None
    part = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in tensor.shape)
    return tensor.detach()[part].reshape(-1).clone().view(torch.uint8)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and past its last; both 0 if it has none."""
    if tensor.is_meta or not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()


class HeldSources:
    """All sources held at a time; each storage counts once, whatever shares it.

    The meta device counts as a device: in a rehearsal it stands for one.

    Attributes:
        device: Bytes held on accelerators.
        host: Bytes held in host memory.
    """

    def __init__(self) -> None:
        self.device = 0
        self.host = 0
        self._storages: dict[int, _Storage] = {}
        # Memory that is still held cannot be allocated again, so a newcomer that overlaps a region
        # is the same memory, reused. Regions are sorted by address and do not overlap.
        self._starts: list[int] = []
        self._regions: dict[int, _Region] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def hold(self, owner: str, tensor: torch.Tensor) -> Source:
        """Count a tensor that is about to be buffered.

        Args:
            owner: Layer and parameter that it is for.
            tensor: Any device.

        Raises:
            SourceReusedError: It lies where an earlier source still lies that is not the same.
        """
        self.check_newcomer(owner, tensor)
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            known = self._storages[storage._cdata] = _Storage(storage.nbytes(), tensor.is_cpu)
            self._add(known, known.nbytes)
        known.holders += 1
        start, end = _extent(tensor)
        version = 0 if tensor.is_inference() else tensor._version
        source = Source(owner, ref(tensor), storage._cdata, start, version, _sample(tensor))
        if start:
            self._region(start, end).sources.add(source)
        return source

    def release(self, source: Source) -> None:
        """Stop counting a source, because its layer has let go of it."""
        storage = self._storages[source.storage]
        storage.holders -= 1
        if not storage.holders:
            del self._storages[source.storage]
            self._add(storage, -storage.nbytes)
        if source.start:
            position = bisect_right(self._starts, source.start) - 1
            region = self._regions[self._starts[position]]
            region.sources.discard(source)
            if not region.sources:
                del self._regions[self._starts.pop(position)]

    def check_newcomer(self, name: str, tensor: torch.Tensor) -> None:
        """Make sure that a tensor from the checkpoint has not overwritten one that is held.

        The same memory may come again with the same contents: tied weights do. Only a source whose
        contents changed is refused.

        Raises:
            SourceReusedError: A held source has lost its contents.
        """
        for start in self._starts[self._overlapping(*_extent(tensor))]:
            for source in self._regions[start].sources:
                self.check_unchanged(source, f" by {name}")

    def check_unchanged(self, source: Source, by: str = "", *, wait: bool = True) -> None:
        """Make sure that a held source still is what arrived.

        Args:
            source: As `hold` returned it.
            by: Who may have overwritten it, for the message.
            wait: Compare the sampled bytes on a GPU too, although the host must wait for them.

        Raises:
            SourceReusedError: It was written to.
        """
        tensor = source.tensor()
        if tensor is None or tensor.is_meta:
            return
        same = tensor.is_inference() or tensor._version == source.version
        if same and source.sample is not None and (wait or tensor.is_cpu):
            now = _sample(tensor)
            same = now is not None and torch.equal(now, source.sample)
        if not same:
            raise SourceReusedError(
                f"{source.owner}: expected a source tensor to stay as it is until its layer is "
                f"complete, found its memory overwritten{by}. The weights come from an iterator "
                "that reuses its buffers: give each tensor memory of its own (clone it), or load "
                "with --load-format safetensors."
            )

    def _add(self, storage: _Storage, nbytes: int) -> None:
        if storage.on_host:
            self.host += nbytes
        else:
            self.device += nbytes

    def _overlapping(self, start: int, end: int) -> slice:
        """Return where in `_starts` the regions stand that share a byte with ``[start, end)``."""
        first = bisect_right(self._starts, start)
        if first and self._regions[self._starts[first - 1]].end > start:
            first -= 1
        return slice(first, max(first, bisect_left(self._starts, end)))

    def _region(self, start: int, end: int) -> _Region:
        """Return the one region that covers ``[start, end)``, joining those that it overlaps."""
        found = self._overlapping(start, end)
        starts = self._starts[found]
        if len(starts) == 1 and starts[0] <= start and end <= self._regions[starts[0]].end:
            return self._regions[starts[0]]
        regions = [self._regions.pop(other) for other in starts]
        start = min((start, *starts))
        joined = _Region(max((end, *(region.end for region in regions))))
        joined.sources.update(*(region.sources for region in regions))
        self._starts[found] = [start]
        self._regions[start] = joined
        return joined


# The sources of the load under way; None when there is no account of it.
under_way: HeldSources | None = None


def watch(weights: Iterable[Any]) -> Iterator[Any]:
    """Hand on checkpoint tensors, refusing one that has overwritten a held one.

    Args:
        weights: ``(name, tensor, ...)`` items.

    Raises:
        SourceReusedError: The weights come from an iterator that reuses its buffers.
    """
    for item in weights:
        if under_way:
            under_way.check_newcomer(item[0], item[1])
        yield item
        del item
