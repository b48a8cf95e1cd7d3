# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Iterators whose buffers are reused are found out; those that share memory rightly are not."""

import ctypes
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from vllm.model_executor.model_loader.reload import accounting, sources
from vllm.model_executor.model_loader.reload.sources import HeldSources, SourceReusedError

ROWS, COLUMNS = 6, 4
# Layer 1 is held when a tensor for layer 0 arrives, and completes in the end.
ORDER = ["layers.1.weight", "layers.0.weight", "layers.0.bias", "layers.1.bias"]
Weights = Iterator[tuple[str, torch.Tensor]]


def contents(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn(model.get_parameter(name).shape) for name in ORDER}


def through_torch(tensors: dict[str, torch.Tensor]) -> Weights:
    """One buffer, filled by torch operations."""
    buffer = torch.empty(ROWS * COLUMNS)
    for name, tensor in tensors.items():
        view = buffer[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, view


def behind_torch(tensors: dict[str, torch.Tensor]) -> Weights:
    """One torch buffer, filled by somebody else, as a reader of files does."""
    buffer = torch.empty(ROWS * COLUMNS)
    for name, tensor in tensors.items():
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        yield name, buffer[: tensor.numel()].view(tensor.shape)


def foreign(tensors: dict[str, torch.Tensor]) -> Weights:
    """A buffer that torch does not own: every tensor is a new storage at the same address."""
    buffer = bytearray(ROWS * COLUMNS * 4)
    for name, tensor in tensors.items():
        buffer[: tensor.nbytes] = bytes(tensor.numpy().data)
        yield (
            name,
            torch.frombuffer(buffer, dtype=torch.float32, count=tensor.numel()).view(tensor.shape),
        )


@pytest.mark.parametrize("iterator", [through_torch, behind_torch, foreign])
def test_reused_buffers_are_refused(load, iterator: Callable[[dict], Weights]):
    with pytest.raises(SourceReusedError) as caught:
        load.model.load_weights(iterator(contents(load.model)))
    assert str(caught.value).startswith("layers.1.weight: expected a source tensor to stay")
    assert "by layers.0.weight" in str(caught.value)
    assert "--load-format safetensors" in str(caught.value)


@pytest.mark.parametrize("iterator", [through_torch, behind_torch, foreign])
def test_reuse_is_found_on_completion_too(load, iterator):
    """A model that is handed tensors directly: nobody sees those of other layers in between."""
    given = iterator(contents(load.model))
    load.give(*next(given))
    next(given)
    next(given)
    name, _ = next(given)
    with pytest.raises(SourceReusedError, match=r"layers\.1\.weight"):
        load.give(name, torch.zeros(ROWS))


def test_an_iterator_that_copies_is_accepted(load):
    expected = contents(load.model)
    load.model.load_weights((n, t.clone()) for n, t in through_torch(expected))
    for name, tensor in expected.items():
        assert torch.equal(load.model.get_parameter(name), tensor)


def test_tied_weights_are_accepted(load):
    """The same tensor under two names is not reuse: its contents stay."""
    tied = torch.randn(ROWS, COLUMNS)
    load.model.load_weights(iter([("layers.0.weight", tied), ("layers.1.weight", tied)]))
    load.model.load_weights(iter([("layers.2.weight", tied[:])]))
    assert load.account.held.host == tied.nbytes


def test_nan_and_empty_sources_are_compared_as_bytes():
    held = HeldSources()
    for tensor in (torch.full((3, 3), float("nan")), torch.empty(0, 4), torch.tensor(1.0)):
        source = held.hold("x", tensor)
        held.check_unchanged(source)
        held.release(source)
    assert not held
    assert (held.device, held.host) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool])
def test_a_change_shows_in_every_dtype(dtype):
    held = HeldSources()
    tensor = torch.zeros(64, 64).to(dtype)
    source = held.hold("x", tensor)
    ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes)
    with pytest.raises(SourceReusedError):
        held.check_unchanged(source)


def test_inference_tensors_have_no_version():
    held = HeldSources()
    with torch.inference_mode():
        tensor = torch.ones(3)
    held.check_unchanged(held.hold("x", tensor))


def test_the_account_is_watched_only_while_it_holds(load):
    accounting.begin()
    items = [("a", torch.ones(1)), ("b", torch.ones(1), {"kept": True})]
    assert list(sources.watch(items)) == items


def seconds_to_hold(tensors: list[torch.Tensor]) -> float:
    held = HeldSources()
    start = time.process_time()
    for source in [held.hold("x", tensor) for tensor in tensors]:
        held.release(source)
    assert not held
    return time.process_time() - start


def test_views_of_one_storage_cost_what_tensors_of_their_own_do():
    """Packed weight transfer hands out views of one large buffer."""
    count = 1600
    views = list(torch.zeros(count, 64).unbind())
    tensors = [torch.zeros(64) for _ in range(count)]
    ratios = [seconds_to_hold(views) / seconds_to_hold(tensors) for _ in range(3)]
    assert min(ratios) < 2


def test_only_what_overlaps_is_compared():
    held, buffer = HeldSources(), torch.zeros(6, 8)
    views = buffer[:2], buffer[3:]
    first, second = held.hold("first", views[0]), held.hold("second", views[1])
    ctypes.memset(buffer.data_ptr(), 1, 16)
    held.check_newcomer("between", buffer[2:3])
    for newcomer in (buffer, buffer[1:4], buffer[:1], buffer.T):
        with pytest.raises(SourceReusedError, match="first: expected"):
            held.check_newcomer("over it", newcomer)
    held.release(first)
    held.check_newcomer("after it", buffer)
    held.release(second)


def test_overlapping_sources_are_released_in_any_order():
    held, buffer = HeldSources(), torch.zeros(6, 8)
    parts = [buffer[:2], buffer[4:], buffer[1:5], buffer, buffer[:2]]
    sources = [held.hold(str(i), part) for i, part in enumerate(parts)]
    assert held.host == buffer.nbytes
    for i in (2, 0, 4, 3, 1):
        held.release(sources[i])
    assert (held.host, bool(held)) == (0, False)
    held.hold("anew", buffer)
