# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The indexed expert mapping: the same entry as a scan finds, whatever name was noted."""

import random
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import expert_index
from vllm.model_executor.model_loader.expert_index import CurrentTensor, IndexedMapping, note_names
from vllm.model_executor.models.utils import AutoWeightsLoader

EXPERTS = 112


@pytest.fixture
def mapping() -> IndexedMapping:
    mapping = fused_moe_make_expert_params_mapping(
        nn.Module(), "w1", "w2", "w3", num_experts=EXPERTS
    )
    assert isinstance(mapping, IndexedMapping)
    return mapping


@pytest.fixture(autouse=True)
def no_tensor_at_hand():
    yield
    CurrentTensor.name = ""


def matches(entries, name):
    """All entries that upstream's loop would accept for a tensor, in its order."""
    return [entry for entry in entries if entry[1] in name]


NAMES = [
    f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{shard}.weight{end}"
    for layer, expert, shard, end in product(
        (1, 92), (0, 1, 7, 10, 11, 111), ("w1", "w2", "w3"), ("_packed", "_scale")
    )
] + ["model.layers.1.block_sparse_moe.gate.weight", "model.experts", "experts.", "", "w1."]


@pytest.mark.parametrize("name", NAMES)
def test_finds_what_a_scan_finds(mapping, name):
    stock = list.__iter__(mapping)
    expected = matches(stock, name)
    CurrentTensor.name = name
    assert matches(mapping, name) == expected
    # The first entries are the right ones, so that the loop ends at once.
    assert list(mapping)[: len(expected)] == expected


def test_a_wrong_name_changes_nothing(mapping):
    """A model may rename a tensor after it was noted; the hint is then useless, not harmful."""
    for noted, used in zip(NAMES, random.Random(0).sample(NAMES, len(NAMES)), strict=True):
        CurrentTensor.name = noted
        assert matches(mapping, used) == matches(list.__iter__(mapping), used)
        assert sorted(mapping) == sorted(list.__iter__(mapping))


def test_redundant_experts_keep_their_order():
    """With load balancing several entries share a checkpoint name, and loops try them in turn."""
    mapping = fused_moe_make_expert_params_mapping(
        nn.Module(), "w1", "w2", "w3", num_experts=8, num_redundant_experts=4
    )
    for expert in range(8):
        name = f"experts.{expert}.w2.weight"
        CurrentTensor.name = name
        expected = matches(list.__iter__(mapping), name)
        assert len(expected) == (2 if expert < 4 else 1)
        assert list(mapping)[: len(expected)] == expected


def test_follows_a_list_that_grows(mapping):
    CurrentTensor.name = "experts.3.w1.weight"
    assert next(iter(mapping))[1] == "experts.3.w1."
    mapping.insert(0, ("new.", "experts.3.w1.", 3, "w1"))
    assert next(iter(mapping))[0] == "new."
    assert len(list(mapping)) == len(mapping) == 3 * EXPERTS + 1


def test_names_without_a_common_beginning_are_scanned():
    entries = [("a", "left.w1.", 0, "w1"), ("b", "right.w1.", 1, "w1")]
    CurrentTensor.name = "right.w1.weight"
    assert list(IndexedMapping(entries)) == entries


def test_upstream_builds_the_same_entries(mapping):
    assert list.__iter__(mapping).__length_hint__() == 3 * EXPERTS
    assert mapping == RoutedExperts.make_expert_params_mapping.__wrapped__(
        nn.Module(), "w1", "w2", "w3", num_experts=EXPERTS
    )


def test_names_reach_the_innermost_loop():
    """Through nested modules the noted name is the one that the loop sees, at every item."""

    seen = []

    class Inner(nn.Module):
        def load_weights(self, weights):
            seen.extend((name, CurrentTensor.name) for name, _ in weights)
            return set()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Inner()

        def load_weights(self, weights):
            return AutoWeightsLoader(self).load_weights(weights)

    class Top(nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model = Outer()
            self.config = SimpleNamespace()

    names = [f"layers.{i}.weight" for i in range(5)]
    tensors = ((f"language_model.model.{name}", torch.empty(0)) for name in names)
    AutoWeightsLoader(Top()).load_weights(tensors)
    assert seen == [(name, name) for name in names]


def test_a_finished_stream_leaves_no_name():
    assert list(note_names([("a", 1), ("b", 2, {})])) == [("a", 1), ("b", 2, {})]
    assert expert_index.CurrentTensor.name == ""
