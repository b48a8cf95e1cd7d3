# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Int4 experts for Kimi-K3 on gfx942, simulated, over a stand-in for AITER: from the flag to the
kernel's arguments. Without the flag, and on every other GPU, nothing is what the overlay made."""

import gc
import importlib
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from mxfp4_int4 import convert_experts
from tests.models.kimi_k3.support.simulated_gpu.int4_support import (
    INT4,
    NAME,
    build_layer,
    fill,
    forget_aiter,
    make_config,
    rank_of,
)
from vllm.config.quantization import QUANT_KEY_NAMES, QuantizationConfigArgs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.rocm_aiter_moe import AiterExperts
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.k3_int4 import aiter, load
from vllm.model_executor.layers.quantization.utils.k3_int4.parameters import PROJECTIONS
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import FLAG, Int4RefusedError
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32

WEIGHTS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def test_the_flags_name_is_registered():
    assert QUANT_KEY_NAMES[INT4] == kInt4Static32
    assert QuantizationConfigArgs(moe=INT4).moe.weight == kInt4Static32


def test_the_flag_selects_aiters_experts(on_gpu):
    on_gpu("gfx942")
    with rank_of(make_config(INT4)):
        method = build_layer().quant_method
    assert method.is_k3_situ_int4_gfx942
    assert method.mxfp4_backend == Mxfp4MoeBackend.AITER_MXFP4_BF16
    assert issubclass(method.experts_cls, AiterExperts)


@pytest.mark.parametrize("weight", [None, "mxfp4"])
def test_gfx942_alone_selects_nothing(on_gpu, weight):
    """Never by architecture: without the flag the experts are those that upstream chooses."""
    on_gpu("gfx942")
    with rank_of(make_config(weight)):
        assert mxfp4._use_k3_situ_int4_gfx942(_situ()) is False
        # Upstream has no MXFP4 experts for SiTU on gfx942, and says so itself.
        with pytest.raises(NotImplementedError, match="No MXFP4 MoE backend"):
            build_layer()


def _situ():
    return SimpleNamespace(activation=MoEActivation.SITU, activation_situ_linear_beta=25.0)


def test_gfx950_serves_mxfp4_as_upstream_does(on_gpu):
    """Without the flag gfx950 takes upstream's own branch; with it, it is refused."""
    on_gpu("gfx950")
    with rank_of(make_config(None)):
        method = build_layer().quant_method
    assert method.is_k3_situ_aiter
    assert not method.is_k3_situ_int4_gfx942
    assert not hasattr(method, "int4_log")
    with rank_of(make_config(INT4)), pytest.raises(Int4RefusedError, match="found the GPU gfx950"):
        build_layer()


def test_draft_layers_follow_the_flag(on_gpu):
    """vLLM builds MTP layers under the target's configuration: they are converted like any other,
    and reported as a load of their own."""
    on_gpu("gfx942")
    with rank_of(make_config(INT4)):
        target = build_layer()
        fill(target)
        target.quant_method.process_weights_after_loading(target)
        draft = build_layer(name="model.layers.93.mtp_block.block_sparse_moe.experts")
        fill(draft)
        draft.quant_method.process_weights_after_loading(draft)
    assert draft.w13_weight.is_shuffled
    assert draft.w13_weight_scale.dtype == torch.bfloat16
    report = target.quant_method.int4_log
    assert draft.quant_method.int4_log is report
    assert [sorted(names) for names in report.loads] == [[target.layer_name], [draft.layer_name]]


@pytest.mark.parametrize("rank", [0, 7])
def test_native_intermediate_size_at_tp8(on_gpu, rank):
    """Kimi-K3's 3072 over eight ranks is 384 each, not 512."""
    on_gpu("gfx942")
    with rank_of(make_config(INT4), tp=8, rank=rank):
        layer = build_layer(experts=2, hidden=3584, inner=3072)
    assert layer.intermediate_size_per_partition == 384
    assert layer.w13_weight.shape == (2, 768, 1792)
    assert layer.w2_weight.shape == (2, 3584, 192)


def test_sizes_that_are_no_whole_tiles_are_padded_as_upstream_pads(on_gpu):
    on_gpu("gfx942")
    with rank_of(make_config(INT4)):
        layer = build_layer(inner=192)
    assert layer.intermediate_size_per_partition == 256
    assert layer.moe_config.intermediate_size_per_partition_unpadded == 192


@pytest.mark.parametrize("rule", ["mse", "absmax"])
def test_conversion_in_place(on_gpu, rule):
    """The converted bytes lie where the MXFP4 bytes lay; values are those of `convert_experts`."""
    on_gpu("gfx942")
    config = make_config(INT4, additional_config={"kimi_k3_int4_scale_rule": rule})
    with rank_of(config):
        layer = build_layer()
        held = fill(layer)
        places = [getattr(layer, f"{name}_weight").data_ptr() for name in PROJECTIONS]
        layer.quant_method.process_weights_after_loading(layer)
    assert [getattr(layer, f"{name}_weight").data_ptr() for name in PROJECTIONS] == places
    for name in PROJECTIONS:
        expected = convert_experts(
            held[f"{name}_weight"], held[f"{name}_weight_scale"], layout="aiter", scale_rule=rule
        )
        weight = getattr(layer, f"{name}_weight")
        assert torch.equal(weight, expected.weight)
        assert torch.equal(getattr(layer, f"{name}_weight_scale"), expected.scale)
        assert weight.is_shuffled
        assert weight.weight_loader is not None


def test_weights_carry_aiters_dtype(on_gpu, monkeypatch):
    """AITER tells int4 from MXFP4 by the dtype; where torch has int4, it is that one."""
    on_gpu("gfx942")
    with rank_of(make_config(INT4)):
        layer = build_layer()
        fill(layer)
        monkeypatch.setattr(importlib.import_module("aiter.dtypes"), "i4x2", torch.int4)
        layer.quant_method.process_weights_after_loading(layer)
    assert layer.w13_weight.dtype == layer.w2_weight.dtype == torch.int4
    assert layer.w13_weight.shape == (4, 768, 128)
    assert aiter.weight_dtype() == torch.int4


def test_sources_are_gone_before_the_next_begins(on_gpu, monkeypatch):
    """When w2 is converted, w13's scales are released; nothing is left of either afterwards."""
    on_gpu("gfx942")
    seen = []
    with rank_of(make_config(INT4)):
        layer = build_layer()
        fill(layer)
        scales = {
            name: weakref.ref(getattr(layer, f"{name}_weight_scale").untyped_storage())
            for name in PROJECTIONS
        }

        def watch(weight, *args, **kwargs):
            if kwargs.get("in_place"):
                seen.append([name for name, scale in scales.items() if scale() is None])
            return convert_experts(weight, *args, **kwargs)

        monkeypatch.setattr(load, "convert_experts", watch)
        gc.disable()
        try:
            layer.quant_method.process_weights_after_loading(layer)
        finally:
            gc.enable()
    assert seen == [[], ["w13"]]
    assert all(scale() is None for scale in scales.values())


def test_whoever_holds_a_source_holds_no_memory(on_gpu):
    """0.32 makes new parameters, and the old ones are empty; 0.33 fills the old ones anew."""
    on_gpu("gfx942")
    with rank_of(make_config(INT4)):
        layer = build_layer()
        fill(layer)
        sources = {name: getattr(layer, name) for name in WEIGHTS}
        layer.quant_method.process_weights_after_loading(layer)
    for name, source in sources.items():
        assert source.numel() == 0 or source is getattr(layer, name)


def test_handed_over_as_upstreams_own_branch_does(on_gpu):
    """Upstream's branch over the stand-in and this one, "absmax": the same bytes, the same kernel.

    The stand-in's quantizer is AITER's as the golden files pin it; tests of the conversion hold
    "absmax" against those files.
    """
    on_gpu("gfx942")
    config = make_config(INT4, additional_config={"kimi_k3_int4_scale_rule": "absmax"})
    with rank_of(config):
        layers = [build_layer(name=f"{NAME}.{i}") for i in range(2)]
        for layer in layers:
            fill(layer, seed=5)
        ours, theirs = (layer.quant_method for layer in layers)
        ours._setup_kernel_k3_situ_gfx942(layers[0])
        # Upstream empties the accelerator's cache; a CPU has none.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.accelerator, "empty_cache", lambda: None)
            upstream = type(theirs)._setup_kernel_k3_situ_gfx942.__wrapped__
            upstream(theirs, layers[1])
    for name in WEIGHTS:
        mine, other = (getattr(layer, name) for layer in layers)
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
        # What upstream marks is marked, and each parameter still has a loader.
        for attribute in ("is_shuffled", "weight_loader"):
            assert hasattr(mine, attribute) == hasattr(other, attribute)
    for part in ("quant_dtype", "weight_quant_dtype", "use_mxfp4_w4a16", "block_shape"):
        assert getattr(ours.moe_quant_config, part) == getattr(theirs.moe_quant_config, part)
    assert type(ours.moe_kernel.fused_experts) is type(theirs.moe_kernel.fused_experts)
    assert torch.equal(ours.moe_quant_config.w1_scale, theirs.moe_quant_config.w1_scale)


def test_kernel_gets_the_constants(on_gpu):
    """The experts call AITER with SiTU, both betas, int4 weights and separate gate and up."""
    on_gpu("gfx942")
    from vllm import _aiter_ops

    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1], [2, 3], [1, 3]], dtype=torch.int32)
    weights = torch.full((3, 2), 0.5)
    with rank_of(make_config(INT4)), pytest.MonkeyPatch.context() as patch:
        # The registered operator is there on ROCm alone; its body is plain Python.
        patch.setattr(
            _aiter_ops.rocm_aiter_ops,
            "fused_moe",
            staticmethod(_aiter_ops._rocm_aiter_fused_moe_impl),
        )
        layer = build_layer()
        fill(layer)
        layer.quant_method.process_weights_after_loading(layer)
        out = layer.quant_method.moe_kernel.fused_experts
        result = torch.empty_like(x)
        arguments = (x, layer.w13_weight, layer.w2_weight, weights, ids, MoEActivation.SITU, 4)
        out.apply(result, *arguments, None, None, None, x, x, None, False)
        (call,) = sys.modules["aiter.fused_moe"].CALLS
    assert (call["beta"], call["linear_beta"], call["gate_mode"]) == (4.0, 25.0, "separated")
    assert call["w1"].is_shuffled
    assert result.isfinite().all()
    assert result.abs().max() > 0


REFUSALS = {
    "no AITER": ({"aiter": None}, {}, "found no AITER in this environment", "flydsl_a16w4_gemm1"),
    "switched off": (
        {"enabled": False},
        {},
        "AITER's fused MoE switched off",
        "VLLM_ROCM_USE_AITER_MOE=1",
    ),
    "no entry point": (
        {"aiter": "without-entry"},
        {},
        "AITER 0.0.stand-in without that entry point",
        "Install an AITER that has it",
    ),
    "no act": ({"aiter": "without-act"}, {}, "would compute SiLU", "Install an AITER that has it"),
    "no SiTU": ({"aiter": "without-situ"}, {}, "has no Situv2", "Install an AITER that has it"),
    "no beta": ({}, {"beta": None}, "no activation_situ_beta", "4.0 and 25.0"),
    "no linear beta": ({}, {"linear_beta": None}, "no activation_situ_linear_beta", "4.0 and 25.0"),
    "split groups": ({}, {"inner": 48}, "intermediate size of 48", "--enable-expert-parallel"),
    "odd groups": ({}, {"hidden": 96}, "hidden size of 96", "multiple of 64"),
    "SiLU": ({}, {"activation": "silu"}, "experts with the activation silu", "SiTU"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_come_before_there_are_weights(on_gpu, monkeypatch, name):
    gpu, sizes, found, remedy = REFUSALS[name]
    on_gpu("gfx942", **gpu)
    monkeypatch.setattr(mxfp4.Mxfp4MoEMethod, "create_weights", _no_weights)
    with rank_of(make_config(INT4)), pytest.raises(Int4RefusedError) as refused:
        build_layer(**sizes)
    message = str(refused.value)
    assert message.startswith(f"{FLAG} is refused: found ")
    assert found in message
    assert "; needed: " in message
    assert remedy in message


def _no_weights(*args, **kwargs):
    raise AssertionError("weights were created before the refusal")


def test_explicit_backend_is_refused(on_gpu):
    on_gpu("gfx942")
    config = make_config(INT4)
    config.kernel_config.moe_backend = "triton"
    with rank_of(config), pytest.raises(Int4RefusedError, match="--moe-backend triton"):
        build_layer()


def test_aiter_is_imported_on_gfx942_only(on_gpu):
    """The CPU platform never looks at AITER, even where one is installed."""
    forget_aiter()
    with rank_of(make_config(INT4)):
        layer = build_layer()
        fill(layer)
        layer.quant_method.process_weights_after_loading(layer)
    assert not [name for name in sys.modules if name.partition(".")[0] == "aiter"]
