# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Zeroing fresh cache blocks on a CPU, where a block may be several kernel pages."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

BLOCKS = 6


def runner(pages_of_layers):
    """What `_zero_block_ids` reads of a runner: layers with caches of ones."""
    attention = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(block_size=64, shapes=((4,),), dtypes=(torch.float32,))
    layers = {
        f"attention.{i}": SimpleNamespace(kv_cache=torch.ones(BLOCKS * pages, 64 // pages, 8))
        for i, pages in enumerate(pages_of_layers)
    }
    layers["state"] = SimpleNamespace(kv_cache=[torch.ones(BLOCKS, 4)])
    groups = [
        SimpleNamespace(kv_cache_spec=attention, layer_names=[n for n in layers if n != "state"]),
        SimpleNamespace(kv_cache_spec=state, layer_names=["state"]),
    ]
    made = CPUModelRunner.__new__(CPUModelRunner)
    made.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups)
    made.compilation_config = SimpleNamespace(static_forward_context=layers)
    return made, layers


@pytest.mark.parametrize("pages", [1, 2, 4])
def test_all_of_the_fresh_blocks_and_nothing_else(pages):
    made, layers = runner([pages, pages])
    made._zero_block_ids([1, 4])
    for name in ("attention.0", "attention.1"):
        blocks = layers[name].kv_cache.view(BLOCKS, -1)
        assert [bool(b.any()) for b in blocks] == [True, False, True, True, False, True]
        assert blocks[[0, 2, 3, 5]].eq(1).all()
    assert layers["state"].kv_cache[0].eq(1).all()


def test_upstream_zeroes_pages_of_other_blocks():
    """The symptom that the ledger names; when this fails, the amendment can go."""
    made, layers = runner([4])
    CPUModelRunner._zero_block_ids.__wrapped__(made, [1])
    blocks = layers["attention.0"].kv_cache.view(BLOCKS, 4, -1)
    assert not blocks[0, 1].any()
    assert blocks[1].eq(1).all()


def test_layers_that_differ_are_refused():
    made, _ = runner([2, 4])
    with pytest.raises(NotImplementedError, match=r"\[2, 4\] pages"):
        made._zero_block_ids([1])


def test_models_without_attention():
    made, layers = runner([])
    made._zero_block_ids([1])
    assert layers["state"].kv_cache[0].eq(1).all()
