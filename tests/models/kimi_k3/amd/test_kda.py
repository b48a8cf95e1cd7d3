# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Layerwise loading of the merged KDA projection: real layers, every padding, stock beside ours."""

import random
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.models.kimi_k3.amd import kda

SHARDS = 6
FORWARD = list(range(SHARDS))
MODEL_CONFIG = SimpleNamespace(dtype=torch.bfloat16)


def shuffled(seed: int) -> list[int]:
    order = FORWARD.copy()
    random.Random(seed).shuffle(order)
    return order


ORDERS = {
    "forward": FORWARD,
    "reverse": FORWARD[::-1],
    "shuffle1": shuffled(1),
    "shuffle2": shuffled(2),
}
by_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())


def start_reload(rank) -> None:
    record_metadata_for_reloading(rank.layer)
    initialize_layerwise_reload(rank.layer)


def check_loaded(rank, sources) -> None:
    """The projection holds its shards bit for bit, zero alignment rows, and computes with them."""
    weight = rank.projection.weight
    expected = rank.expected(sources)
    assert weight.shape[0] == rank.real_rows + rank.padding
    assert torch.equal(weight[: rank.real_rows], expected)
    assert torch.equal(weight[rank.real_rows :], torch.zeros_like(weight[rank.real_rows :]))
    x = torch.randint(-8, 9, (5, weight.shape[1])).to(weight.dtype)
    output, _ = rank.projection(x)
    assert torch.equal(output[:, : rank.real_rows], x @ expected.T)
    assert torch.equal(output[:, rank.real_rows :], torch.zeros_like(output[:, rank.real_rows :]))


def load_and_check(rank, order, seed=0) -> None:
    """Complete exactly at the last shard, release every source, hold the right values."""
    sources = rank.sources(seed)
    references = []
    for position, (_, reference) in enumerate(rank.load(sources, order)):
        references.append(reference)
        last = position == len(order) - 1
        assert rank.projection.weight.is_meta is not last
        # Held until the layer completes, and not a moment longer.
        assert all((reference() is None) is last for reference in references)
    check_loaded(rank, sources)


@by_order
@pytest.mark.parametrize("heads", [96, 128])
@pytest.mark.parametrize("rank_id", [0, 7])
@pytest.mark.usefixtures("poisoned_memory")
def test_completes_at_the_last_shard(rank_of, heads, rank_id, order):
    with rank_of(heads=heads, tp=8, rank=rank_id) as rank:
        assert rank.padding == {96: 4, 128: 0}[heads]
        start_reload(rank)
        load_and_check(rank, order)


@by_order
@pytest.mark.parametrize("heads", [96, 128])
@pytest.mark.parametrize("rank_id", [0, 7])
@pytest.mark.usefixtures("poisoned_memory", "stock")
def test_stock_holds_only_the_padded(rank_of, heads, rank_id, order):
    with rank_of(heads=heads, tp=8, rank=rank_id) as rank:
        start_reload(rank)
        if not rank.padding:
            load_and_check(rank, order)
            return
        references = [reference for _, reference in rank.load(rank.sources(), order)]
        assert rank.projection.weight.is_meta
        assert all(reference() is not None for reference in references)
        finalize_layerwise_reload(rank.layer, MODEL_CONFIG)
        assert rank.projection.weight[rank.real_rows :].isnan().all()


@pytest.mark.parametrize("tp", [1, 2, 4, 16, 32])
@pytest.mark.usefixtures("poisoned_memory")
def test_tensor_parallel_sizes(rank_of, tp):
    with rank_of(heads=96, tp=tp, rank=tp - 1) as rank:
        start_reload(rank)
        load_and_check(rank, shuffled(tp))


@pytest.mark.parametrize("heads", range(1, 17))
@pytest.mark.usefixtures("poisoned_memory")
def test_every_padding(rank_of, heads):
    with rank_of(heads=heads, tp=1) as rank:
        assert rank.padding == 16 - heads
        start_reload(rank)
        load_and_check(rank, shuffled(heads))


@pytest.mark.usefixtures("poisoned_memory")
def test_without_rezeroing_alignment_rows_are_garbage(rank_of, monkeypatch):
    """The zeros come from the loader, not from luck."""
    monkeypatch.setattr(
        kda._PaddedKimiGDNMergedColumnParallelLinear, "_fill_alignment", lambda self, param: None
    )
    with rank_of(heads=96) as rank:
        start_reload(rank)
        list(rank.load(rank.sources(), FORWARD))
        assert rank.projection.weight[rank.real_rows :].isnan().all()


def test_unpadded_layer_is_left_alone(rank_of):
    with rank_of(heads=128) as rank:
        assert not hasattr(rank.projection.weight, "weight_loader_numel")
        assert not hasattr(rank.projection.weight, "shard_record")


def test_counts_the_rows_of_a_checkpoint(rank_of):
    with rank_of(heads=96) as rank:
        weight = rank.projection.weight
        assert weight.shape[0] == 6288
        assert weight.weight_loader_numel == 6284 * weight.shape[1]


@pytest.mark.usefixtures("poisoned_memory")
def test_reload_twice_with_new_values(rank_of):
    """The weight update of reinforcement learning: kernel tensors keep their storage."""
    with rank_of(heads=96, rank=7) as rank:
        storage = rank.projection.weight.data_ptr()
        record_metadata_for_reloading(rank.layer)
        for seed in (1, 2):
            initialize_layerwise_reload(rank.layer)
            load_and_check(rank, shuffled(seed), seed=seed)
            finalize_layerwise_reload(rank.layer, MODEL_CONFIG)
            assert rank.projection.weight.data_ptr() == storage
            check_loaded(rank, rank.sources(seed))


def test_load_without_layerwise_processing(rank_of):
    with rank_of(heads=96, rank=7) as rank:
        sources = rank.sources()
        rank.projection.weight.data.fill_(float("nan"))
        list(rank.load(sources, shuffled(3)))
        rank.projection.quant_method.process_weights_after_loading(rank.projection)
        check_loaded(rank, sources)


@pytest.mark.parametrize("repeated", range(SHARDS))
@pytest.mark.usefixtures("poisoned_memory")
def test_repeated_shard_counts_once_and_the_last_wins(rank_of, repeated):
    """Counted twice, the wide shards would end the wait before the narrow ones had come."""
    with rank_of(heads=96) as rank:
        start_reload(rank)
        sources = rank.sources()
        stale = [source.clone() for source in sources]
        stale[repeated] = -sources[repeated]
        list(rank.load(stale, [repeated] * 5))
        load_and_check(rank, [repeated, *(s for s in FORWARD if s != repeated)])


@pytest.mark.parametrize("lacking", [[0], [3], [5], [4, 5]], ids=str)
def test_missing_shard_is_named(rank_of, lacking):
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    with rank_of(heads=96) as rank:
        start_reload(rank)
        list(rank.load(rank.sources(), [s for s in FORWARD if s not in lacking]))
        with pytest.raises(ValueError, match="the weights ended without") as error:
            finalize_layerwise_reload(rank.layer, MODEL_CONFIG)
        message = str(error.value)
        assert message.startswith("model.layers.0.self_attn.in_proj_qkvgfab.weight: ")
        absent = message.split(" Expected")[0]
        for shard, name in enumerate(names):
            assert (f"{name} (shard {shard})" in absent) is (shard in lacking)


def test_weights_that_do_not_come_keep_the_old_ones(rank_of):
    """An update without any shard of the layer is upstream's to handle: the old weights stay."""
    with rank_of(heads=96) as rank:
        sources = rank.sources(4)
        list(rank.load(sources, FORWARD))
        rank.projection.quant_method.process_weights_after_loading(rank.projection)
        start_reload(rank)
        finalize_layerwise_reload(rank.layer, MODEL_CONFIG)
        check_loaded(rank, sources)


@by_order
@pytest.mark.usefixtures("poisoned_memory")
def test_online_fp8(rank_of, order):
    """Per-channel FP8, quantized as the layer completes: no scale is NaN or infinite."""
    with rank_of(heads=96, rank=7, online="fp8_per_channel_static") as rank:
        sources = rank.sources()
        references = []
        for position, (_, reference) in enumerate(rank.load(sources, order)):
            references.append(reference)
            assert rank.projection.weight.is_meta is (position < SHARDS - 1)
        assert all(reference() is None for reference in references)
        assert not get_layerwise_info(rank.projection).can_load()
        scale = rank.projection.weight_scale
        assert scale.isfinite().all()
        values = rank.projection.weight.T.float() * scale
        assert not values[rank.real_rows :].any()
        # Integers up to 8 in e4m3 under a scale of amax/448: at most half a step of 2^-4 relative.
        expected = rank.expected(sources).float()
        assert ((values[: rank.real_rows] - expected).abs() <= expected.abs() / 16).all()


@pytest.mark.usefixtures("poisoned_memory", "stock")
def test_online_fp8_on_stock_is_held_and_then_nan(rank_of):
    with rank_of(heads=96, online="fp8_per_channel_static") as rank:
        list(rank.load(rank.sources(), FORWARD))
        assert rank.projection.weight.is_meta
        finalize_layerwise_reload(rank.layer, MODEL_CONFIG)
        assert rank.projection.weight_scale[rank.real_rows :].isnan().all()


def test_refuses_an_unknown_set_of_shards():
    with pytest.raises(ValueError, match=r"layer\.proj: expected 6 output sizes"):
        kda._PaddedKimiGDNMergedColumnParallelLinear(
            64, [16] * 5, replicated_shard_id=4, tp_size=1, prefix="layer.proj"
        )
