# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Headers as a stream of tensors without memory: names, shapes, orders, and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file

from k3_checkpoint import Checkpoint
from k3_checkpoint.presets import PRESETS
from k3_checkpoint.shards import INDEX_NAME
from k3_checkpoint.write import write_checkpoint
from kimi_k3.rehearsal.stream import Order, headers, tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream") / "tiny"
    write_checkpoint(folder, PRESETS["tiny"], shards=3)
    return folder


def test_every_tensor_as_it_is(checkpoint):
    expected = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        expected |= load_file(file)
    found = dict(tensors(headers(checkpoint)))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.is_meta
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)


def test_orders(checkpoint):
    index = list(headers(checkpoint))
    assert list(headers(checkpoint, Order.REVERSE)) == index[::-1]
    shuffled = list(headers(checkpoint, Order.SHUFFLED, 1))
    assert shuffled == list(headers(checkpoint, Order.SHUFFLED, 1))
    assert shuffled != list(headers(checkpoint, Order.SHUFFLED, 2))
    assert sorted(map(str, shuffled)) == sorted(map(str, index))


def test_missing_shards_are_named(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match="found none"):
        list(headers(tmp_path))
    name = Checkpoint.open(checkpoint).shards[1]
    (tmp_path / "model.safetensors.index.json").write_text(
        (checkpoint / "model.safetensors.index.json").read_text()
    )
    with pytest.raises(FileNotFoundError, match=f"{name}.* missing"):
        list(headers(tmp_path))


def test_a_truncated_shard_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ValueError, match=r"model\.safetensors: .* truncated"):
        list(headers(tmp_path))


def test_tensors_hold_no_memory():
    (item,) = tensors(iter([("x", torch.bfloat16, [1 << 20, 1 << 20])]))
    assert item[1].nbytes == 2 << 40


def test_names_say_how_many_shards_there_are(checkpoint, tmp_path):
    """What a checkpoint looks like whose writing was interrupted: no index, no last shard."""
    *files, last = Checkpoint.open(checkpoint).files
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(FileNotFoundError, match=f"{last.name} missing"):
        list(headers(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "expected a weight_map"),
        ("[1]", "expected a JSON object"),
        ('{"weight_map": {"a": 5}}', "expected names of files beside it"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "expected names of files beside it"),
    ],
)
def test_an_index_that_is_none(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(headers(tmp_path))


def test_shards_are_held_to_the_index(checkpoint, tmp_path):
    """vLLM takes what the shards hold and never looks whether the index says the same."""
    for file in Checkpoint.open(checkpoint).files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((checkpoint / INDEX_NAME).read_text())
    located = index["weight_map"]
    first = next(iter(located))
    for change, message in (
        ({"ghost": located[first]}, "ghost: the index says .*, it is in no shard"),
        ({first: next(n for n in located.values() if n != located[first])}, f".*{first}"),
    ):
        changed = index | {"weight_map": located | change}
        (tmp_path / INDEX_NAME).write_text(json.dumps(changed))
        for order in Order:
            with pytest.raises(ValueError, match=message):
                list(headers(tmp_path, order))
