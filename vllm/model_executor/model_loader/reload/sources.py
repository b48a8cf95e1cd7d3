# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The source tensors that a load holds back: how many bytes, where, and whether they stay as they
were. Never keeps a tensor alive by itself, and never loads or copies one.
"""

from dataclasses import dataclass
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
    holders: int
    start: int


@dataclass(slots=True)
class Source:
    """One held tensor.

    Attributes:
        owner: Layer and parameter that it was given to, for messages.
        tensor: Weak reference to it; whoever buffered it keeps it alive.
        storage: Identity of its storage among the held ones.
        version: torch's count of in-place writes when it arrived.
        sample: A few of its bytes when it arrived; None on the meta device.
    """

    owner: str
    tensor: ref
    storage: int
    version: int
    sample: torch.Tensor | None


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_meta:
        return None
    part = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in tensor.shape)
    return tensor.detach()[part].reshape(-1).clone().view(torch.uint8)


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
        self._sources: dict[int, Source] = {}
        # Start address of a held storage -> its identity. Memory that is still held cannot be
        # allocated again, so a newcomer at one of these addresses is the same memory, reused.
        self._addresses: dict[int, int] = {}

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
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            known = _Storage(storage.nbytes(), tensor.is_cpu, 0, storage.data_ptr())
            self._storages[key] = known
            if known.start:
                self._addresses[known.start] = key
            self._add(known, known.nbytes)
        known.holders += 1
        version = 0 if tensor.is_inference() else tensor._version
        source = Source(owner, ref(tensor), key, version, _sample(tensor))
        self._sources[id(source)] = source
        return source

    def release(self, source: Source) -> None:
        """Stop counting a source, because its layer has let go of it."""
        del self._sources[id(source)]
        storage = self._storages[source.storage]
        storage.holders -= 1
        if not storage.holders:
            del self._storages[source.storage]
            self._addresses.pop(storage.start, None)
            self._add(storage, -storage.nbytes)

    def check_newcomer(self, name: str, tensor: torch.Tensor) -> None:
        """Make sure that a tensor from the checkpoint has not overwritten one that is held.

        The same storage may come again with the same contents: tied weights do. Only a source whose
        contents changed is refused.

        Raises:
            SourceReusedError: A held source has lost its contents.
        """
        start = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
        key = self._addresses.get(start) if start else None
        if key is None:
            return
        for source in self._sources.values():
            if source.storage == key:
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


def sources_in(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the sources among a weight loader's arguments.

    Args:
        args: Positional arguments; where there are any, the first is the parameter.
        kwargs: Keyword arguments.
    """
    named = (value for name, value in kwargs.items() if name != "param")
    return [value for value in (*args[1:], *named) if isinstance(value, torch.Tensor)]
