# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Packed int4 experts end, byte for byte, where the online conversion of their source ends: on a
CPU and on a simulated gfx942, on every rank of a layout. What is damaged is named."""

import gc
import json
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from mxfp4_int4 import convert_experts
from mxfp4_int4.layouts import (
    pack_codes,
    unpack_codes,
)
from tests.models.kimi_k3.support.simulated_gpu.int4_support import (
    INT4,
    NAME,
    build_layer,
    draw_experts,
    load,
    load_experts,
    make_config,
    pack,
    packed_quant,
    rank_of,
)
from vllm.model_executor.layers.quantization.utils.k3_int4 import packed
from vllm.model_executor.layers.quantization.utils.k3_int4.packed import DamagedExpertsError
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import Int4RefusedError

WEIGHTS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
RULES = ("mse", "absmax")


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    return words.contiguous().view(torch.uint8)


@pytest.mark.parametrize("value", range(16))
def test_every_nibble_at_every_place(value):
    """One nibble of 16 x 64 at a time is not zero; where it goes is the definition's business."""
    codes = torch.zeros(1024, 16, 64, dtype=torch.int8)
    codes.view(1024, 1024).fill_diagonal_(value - 8)
    words = pack_codes(codes, "pack_quantized")
    assert torch.equal(packed.place_nibbles(as_bytes(words)), pack_codes(codes, "aiter"))


@pytest.mark.parametrize(
    "shape", [(1, 16, 64), (3, 48, 192), (2, 768, 3584), (1, 3584, 384), (0, 16, 64)]
)
def test_words_become_aiters_bytes(shape):
    g = torch.Generator().manual_seed(1)
    e, n, k = shape
    words = torch.randint(-(2**31), 2**31, (e, n, k // 8), generator=g).int()
    expected = pack_codes(unpack_codes(words, "pack_quantized", shape), "aiter")
    before = words.clone()
    assert torch.equal(packed.place_nibbles(as_bytes(words)), expected)
    assert torch.equal(words, before)


@pytest.mark.parametrize("chunk", [None, 3, 8])
@pytest.mark.parametrize("rule", RULES)
def test_repacked_in_place_as_converted(rule, chunk):
    g = torch.Generator().manual_seed(2)
    source = torch.randint(0, 256, (5, 48, 96), generator=g, dtype=torch.uint8)
    # All the scales that no conversion refuses, those that "absmax" clamps among them.
    scale = torch.randint(0, 253, (5, 48, 6), generator=g).byte()
    expected = convert_experts(source, scale, layout="aiter", scale_rule=rule)
    words, scales, _ = convert_experts(source, scale, layout="pack_quantized", scale_rule=rule)
    places = words.data_ptr(), scales.data_ptr()
    weight, flat = packed.repack_in_place(as_bytes(words), scales, chunk)
    assert (weight.data_ptr(), flat.data_ptr()) == places
    assert torch.equal(weight, expected.weight)
    assert torch.equal(flat.view(torch.int16), expected.scale.view(torch.int16))


def test_interrupted_experts_are_unusable(monkeypatch):
    words = torch.zeros(16, 16, 8, dtype=torch.int32)
    scales = torch.ones(16, 16, 2, dtype=torch.bfloat16)
    calls = []

    def break_off(weight):
        calls.append(weight)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return weight

    monkeypatch.setattr(packed, "place_nibbles", break_off)
    with pytest.raises(KeyboardInterrupt) as stopped:
        packed.repack_in_place(as_bytes(words), scales)
    assert scales.isnan().all()
    assert "half way" in stopped.value.__notes__[0]


def both_ways(rule, *, tp=1, rank=0, experts=4, hidden=256, inner=384, ep=False):
    """A layer converted online, and one from the packed tensors of the same experts."""
    source = draw_experts(experts, hidden, inner)
    layers = []
    for weight, quant in ((INT4, None), (None, packed_quant)):
        config = make_config(weight, additional_config={"kimi_k3_int4_scale_rule": rule})
        config.parallel_config.enable_expert_parallel = ep
        with rank_of(config, tp=tp, rank=rank):
            sizes = {"experts": experts, "hidden": hidden, "inner": inner}
            layer = build_layer(**sizes | ({"quant": quant} if quant else {}))
            load_experts(layer, source, rule if quant else None)
            layer.quant_method.process_weights_after_loading(layer)
        layers.append(layer)
    return layers


def assert_same(online, offline):
    for name in WEIGHTS:
        mine, other = getattr(offline, name), getattr(online, name)
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), name
        for attribute in ("is_shuffled", "weight_loader"):
            assert hasattr(mine, attribute) == hasattr(other, attribute)


LAYOUTS = {
    "tp1": {},
    "tp2, rank 1": {"tp": 2, "rank": 1},
    "tp2, padded": {"tp": 2, "rank": 1, "inner": 192},
    "tp8, Kimi-K3's sizes": {"tp": 8, "rank": 7, "experts": 2, "hidden": 3584, "inner": 3072},
    "tp2, spread": {"tp": 2, "rank": 1, "ep": True},
    "odd hidden size": {"hidden": 320, "inner": 32},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_the_online_conversion_on_a_cpu(layout):
    online, offline = both_ways("mse", **LAYOUTS[layout])
    assert_same(online, offline)
    assert type(offline.quant_method.moe_kernel.fused_experts).__name__ == "CPUSituInt4Experts"
    for part in ("quant_dtype", "weight_quant_dtype", "use_mxfp4_w4a16", "block_shape"):
        ours, theirs = (layer.quant_method.moe_quant_config for layer in (offline, online))
        assert getattr(ours, part) == getattr(theirs, part)


# Not the padding of "absmax", whose zeros have another scale than those of "mse".
@pytest.mark.parametrize(
    ("layout", "rule"),
    [(layout, "mse") for layout in ("tp1", "tp2, padded", "tp8, Kimi-K3's sizes", "tp2, spread")]
    + [(layout, "absmax") for layout in ("tp1", "tp8, Kimi-K3's sizes")],
)
def test_equal_to_the_online_conversion_on_gfx942(on_gpu, layout, rule):
    """What AITER is handed, its dtype and marks included."""
    on_gpu("gfx942")
    online, offline = both_ways(rule, **LAYOUTS[layout])
    assert_same(online, offline)
    assert type(offline.quant_method.moe_kernel.fused_experts) is type(
        online.quant_method.moe_kernel.fused_experts
    )
    assert offline.w13_weight.is_shuffled


def test_padding_is_zero_whatever_was_in_memory():
    """A reload leaves garbage; a byte of zero is two codes of -8."""
    with rank_of(make_config(None), tp=2):
        layer = build_layer(hidden=128, inner=192, quant=packed_quant)
        assert layer.intermediate_size_per_partition == 128
        for name in WEIGHTS:
            getattr(layer, name).data.fill_(0 if name.endswith("weight") else torch.nan)
        load_experts(layer, draw_experts(4, 128, 192), "mse")
        layer.quant_method.process_weights_after_loading(layer)
    inner = torch.arange(128) >= 96
    codes = unpack_codes(layer.w13_weight, "aiter", (4, 256, 128)).view(4, 2, 128, 128)
    assert not codes[:, :, inner].any()
    codes = unpack_codes(layer.w2_weight, "aiter", (4, 128, 128))
    assert not codes[:, :, inner].any()
    assert layer.w13_weight_scale.isfinite().all()
    assert layer.w2_weight_scale.isfinite().all()


def test_nothing_is_held_beside_the_weights():
    """The experts stay where they were loaded; whoever holds an old parameter holds no bytes."""
    with rank_of(make_config(None)):
        layer = build_layer(quant=packed_quant)
        load_experts(layer, draw_experts(4, 256, 384), "mse")
        places = [getattr(layer, name).data_ptr() for name in WEIGHTS]
        sources = {name: getattr(layer, name) for name in WEIGHTS}
        gone = [weakref.ref(getattr(layer, name).untyped_storage()) for name in WEIGHTS]
        layer.quant_method.process_weights_after_loading(layer)
    assert [getattr(layer, name).data_ptr() for name in WEIGHTS] == places
    for name, source in sources.items():
        assert source.numel() == 0 or source is getattr(layer, name)
    del source, sources
    layer.quant_method = None
    for name in WEIGHTS:
        delattr(layer, name)
    gc.collect()
    assert [storage() for storage in gone] == [None] * 4


@pytest.mark.parametrize("backwards", [False, True])
def test_weights_are_updated_in_place(backwards):
    """A layerwise reload is complete with its last tensor, not before, and keeps the addresses."""
    from vllm.model_executor.model_loader.reload import layerwise

    with rank_of(make_config(None)):
        model = torch.nn.Module()
        model.layer = layer = build_layer(quant=packed_quant)
        layerwise.record_metadata_for_reloading(model)
        load_experts(layer, draw_experts(4, 256, 384), "mse")
        process(layer)
        places = [getattr(layer, name).data_ptr() for name in WEIGHTS]
        source = draw_experts(4, 256, 384, seed=1)
        layerwise.initialize_layerwise_reload(model)
        order = [(e, shard) for e in range(4) for shard in ("w1", "w3", "w2")]
        for expert, shard in reversed(order) if backwards else order:
            tensors = pack(*source[expert][shard], "mse")
            # Either the largest tensor comes last or the smallest.
            names = sorted(tensors, reverse=backwards)
            load(layer, expert, shard, {name: tensors[name] for name in names})
        layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
        assert [getattr(layer, name).data_ptr() for name in WEIGHTS] == places
        fresh = build_layer(name=f"{NAME}.other", quant=packed_quant)
        load_experts(fresh, source, "mse")
        process(fresh)
    for name in WEIGHTS:
        assert torch.equal(getattr(layer, name), getattr(fresh, name))


@pytest.fixture
def layer():
    with rank_of(make_config(None)):
        built = build_layer(quant=packed_quant)
        load_experts(built, draw_experts(4, 256, 384), "mse")
        yield built


def process(layer):
    layer.quant_method.process_weights_after_loading(layer)


def test_missing_tensors_are_named(layer):
    layer.w2_weight_scale.data[2, 17:, 3] = torch.nan
    with pytest.raises(DamagedExpertsError, match=r"w2, expert 2 on this rank, row 17, group 3"):
        process(layer)
    # Nothing was changed: with the scale in place the layer is as good as any.
    layer.w2_weight_scale.data[2, 17:, 3] = 1.0
    process(layer)


def test_experts_without_their_shape_are_named(layer):
    layer.w13_weight_shape.data[1:3] = 0
    with pytest.raises(DamagedExpertsError) as damaged:
        process(layer)
    message = str(damaged.value)
    assert message.startswith(
        f"{NAME}.w13, expert 1 on this rank: expected weight_shape [384, 256]"
    )
    assert "found [0, 0] (2 such experts)" in message
    assert message.endswith("fetch or convert it again.")


def test_invented_weights_need_no_shapes(layer):
    """`--load-format dummy` fills what it can and reads nothing."""
    layer.w13_weight_shape.data.zero_()
    layer.w2_weight_shape.data.zero_()
    process(layer)


WRONG = {
    "uint8": (
        {"weight": torch.zeros(384, 128, dtype=torch.uint8)},
        "torch.int32 of two dimensions",
    ),
    "float scales": ({"weight_scale": torch.ones(384, 8)}, "torch.bfloat16 of two dimensions"),
    "flat": ({"weight": torch.zeros(384 * 32, dtype=torch.int32)}, "of two dimensions"),
    "narrow": ({"weight": torch.zeros(384, 28, dtype=torch.int32)}, "expected [384, 32]"),
    "short": ({"weight": torch.zeros(352, 32, dtype=torch.int32)}, "expected [384, 32]"),
    "few groups": (
        {"weight_scale": torch.ones(384, 7, dtype=torch.bfloat16)},
        "expected [384, 8], found [384, 7]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused_as_they_come(layer, name):
    """Upstream's loader would cast, cut or pad them."""
    tensors, expected = WRONG[name]
    with pytest.raises(DamagedExpertsError) as damaged:
        load(layer, 3, "w3", tensors)
    assert expected in str(damaged.value)
    assert ", expert 3, w3: " in str(damaged.value)


def test_ranks_cannot_share_a_group():
    """Refused when a layer is built, and where Kimi-K3's model pads a rank's part, when it loads:
    96 over two ranks are 48, a group and a half."""
    config = make_config(None)
    with rank_of(config, tp=2), pytest.raises(Int4RefusedError, match="size of 48 per rank"):
        build_layer(inner=96, quant=packed_quant)
    with rank_of(config, tp=2):
        layer = build_layer(inner=512, quant=packed_quant)
        layer.moe_config.intermediate_size_per_partition_unpadded = 48
        (expert,) = draw_experts(1, 256, 96)
        for shard in ("w1", "w2"):
            for suffix, tensor in pack(*expert[shard], "mse").items():
                if suffix == "weight_shape" or (shard == "w1" and suffix == "weight_scale"):
                    continue
                with pytest.raises(Int4RefusedError) as refused:
                    load(layer, 0, shard, {suffix: tensor})
                message = str(refused.value)
                assert message.startswith("the checkpoint of packed int4 experts is refused: ")
                assert "an intermediate size of 96 over 2 ranks" in message
                assert message.endswith("ranks or --enable-expert-parallel.")


LAYER_OF_KIMI_K3 = """
import json
import torch
import vllm_overlay

vllm_overlay.activate()
from types import SimpleNamespace
from vllm.model_executor.layers.quantization.utils.k3_int4 import packed

EXPERTS = 896
layer = torch.nn.Module()
layer.layer_name = "model.layers.1.block_sparse_moe.experts"
parallel = SimpleNamespace(tp_size=8)
moe = SimpleNamespace(
    w13_num_shards=2,
    hidden_dim_unpadded=3584,
    intermediate_size_per_partition_unpadded=384,
    moe_parallel_config=parallel,
)
packed.register(layer, moe, EXPERTS, 3584, 384, None)
for name in ("w13", "w2"):
    getattr(layer, f"{name}_weight_scale").data.fill_(1)
record = packed.repack_layer(layer, moe, torch.uint8)
print(json.dumps({"extra": record.peak_extra_bytes, "seconds": record.seconds}))
"""


@pytest.mark.slow
def test_memory_of_a_layer_of_kimi_k3():
    """896 experts at TP8, 1.83 GiB: beyond them, two copies of a chunk of eight experts."""
    ended = subprocess.run(
        [sys.executable, "-c", LAYER_OF_KIMI_K3],
        env={**os.environ, "VLLM_KIMI_K3_LOAD_ACCOUNT": "measured"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    measured = json.loads(ended.stdout.splitlines()[-1])
    chunk = 8 * 768 * 3584 // 2
    assert 0 < measured["extra"] <= 2 * chunk + (8 << 20)
