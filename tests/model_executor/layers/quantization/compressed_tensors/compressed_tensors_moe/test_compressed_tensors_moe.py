# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Who serves which experts of a compressed-tensors checkpoint: this project those of Kimi-K3 in
packed int4, on a CPU and on gfx942; upstream all others. And what upstream has for packed SiTU."""

import inspect
from importlib import import_module

import pytest
import torch

from tests.models.kimi_k3.support.simulated_gpu.int4_support import (
    build_layer,
    make_config,
    packed_quant,
    rank_of,
)
from vllm.model_executor.layers.fused_moe.experts.rocm_aiter_moe import AiterExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import Int4RefusedError
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    check_moe_marlin_supports_config,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32

EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
UPSTREAM = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
    "compressed_tensors_moe_wna16"
)


class Upstreams(Exception):
    """Upstream was asked for its method."""


@pytest.fixture
def to_upstream(monkeypatch):
    def refuse(*args, **kwargs):
        raise Upstreams

    monkeypatch.setattr(f"{UPSTREAM}.CompressedTensorsWNA16MoEMethod", refuse)


def build(quant=packed_quant, **changes):
    config = make_config(None)
    config.kernel_config.moe_backend = changes.pop("moe_backend", "auto")
    with rank_of(config, tp=changes.pop("tp", 1)):
        return build_layer(quant=quant, **changes)


def test_a_cpu_serves_them():
    layer = build()
    method = layer.quant_method
    assert type(method).__name__ == "PackedInt4MoEMethod"
    assert method.experts_cls.__name__ == "CPUSituInt4Experts"
    assert layer.w13_weight.dtype == torch.uint8
    assert layer.w13_weight_scale.dtype == torch.bfloat16


def test_gfx942_serves_them(on_gpu, monkeypatch):
    monkeypatch.delenv("AITER_BF16_FP8_MOE_BOUND", raising=False)
    on_gpu("gfx942")
    method = build(inner=3072, hidden=3584, experts=2, tp=8).quant_method
    assert type(method).__name__ == "PackedInt4MoEMethod"
    assert issubclass(method.experts_cls, AiterExperts)
    assert method.moe.intermediate_size_per_partition == 384


@pytest.mark.parametrize("architecture", ["gfx950", "gfx1250", "cuda"])
def test_other_gpus_are_upstreams(on_gpu, to_upstream, architecture):
    on_gpu(architecture)
    with pytest.raises(Upstreams):
        build()


OTHERS = {
    "eight bits": {"quant": lambda: packed_quant(num_bits=8)},
    "asymmetric": {"quant": lambda: packed_quant(symmetric=False)},
    "wide groups": {"quant": lambda: packed_quant(group_size=64)},
    "channels": {"quant": lambda: packed_quant(strategy="channel", group_size=None)},
    "SiLU": {"activation": "silu"},
    "a backend": {"moe_backend": "emulation"},
}


@pytest.mark.parametrize("architecture", ["cpu", "gfx942"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_experts_are_upstreams(on_gpu, to_upstream, architecture, name):
    if architecture == "gfx942":
        on_gpu("gfx942")
    with pytest.raises(Upstreams):
        build(**OTHERS[name])


def test_experts_that_stay_mxfp4_are_served_beside_them():
    """On a CPU; `kimi-k3 convert --exclude` leaves such a checkpoint."""
    weights = {"type": "float", "num_bits": 4, "group_size": 32, "strategy": "group"}
    method = build(lambda: packed_quant({"format": "mxfp4-pack-quantized"}, **weights)).quant_method
    assert type(method) is Mxfp4MoEMethod
    assert method.experts_cls.__name__ == "CPUSituMxfp4Experts"


REFUSALS = {
    "no AITER": ({"aiter": None}, {}, "found no AITER", "serve the MXFP4 checkpoint"),
    "switched off": ({"enabled": False}, {}, "switched off", "VLLM_ROCM_USE_AITER_MOE=1"),
    "no entry": ({"aiter": "without-entry"}, {}, "without that entry point", "Install an AITER"),
    "no act": ({"aiter": "without-act"}, {}, "would compute SiLU", "Install an AITER"),
    "no SiTU": ({"aiter": "without-situ"}, {}, "has no Situv2", "Install an AITER"),
    "no beta": ({}, {"beta": None}, "no activation_situ_beta", "4.0 and 25.0"),
    "split groups": ({}, {"inner": 48}, "intermediate size of 48", "--enable-expert-parallel"),
    "odd groups": ({}, {"hidden": 96}, "hidden size of 96", "Serve the MXFP4 checkpoint"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_come_before_there_are_weights(on_gpu, monkeypatch, name):
    gpu, sizes, found, remedy = REFUSALS[name]
    on_gpu("gfx942", **gpu)
    monkeypatch.setattr(torch, "full", None)
    with pytest.raises(Int4RefusedError) as refused:
        build(**sizes)
    message = str(refused.value)
    assert message.startswith("the checkpoint of packed int4 experts is refused: found ")
    assert found in message
    assert remedy in message
    assert "flag" not in message


SITU = "kernel does not support MoEActivation.SITU activation"
# What docs/int4.md says of stock vLLM: experts, and why they would not serve these on their device.
STOCK = {
    "marlin_moe.MarlinExperts": None,
    "int4_emulation_moe.Int4EmulationTritonExperts": None,
    "rdna3_moe.Rdna3WNA16Experts": None,
    "triton_moe.TritonWNA16Experts": SITU,
    "trtllm_mxint4_moe.TrtLlmMxint4ExpertsMonolithic": SITU,
    "xpu_moe.XPUExpertsWNA16": SITU,
    "cpu_moe.CPUExpertsInt4": SITU,
    "zentorch_moe.ZentorchExpertsInt4": SITU,
}


@pytest.mark.parametrize("name", STOCK)
def test_what_stock_has_for_them(monkeypatch, name):
    """Every class that upstream's choice knows for int4, asked as upstream asks it."""
    module, _, experts = name.partition(".")
    cls = getattr(import_module(f"{EXPERTS}.{module}"), experts)
    monkeypatch.setattr(cls, "_supports_current_device", staticmethod(lambda: True))
    moe = build(hidden=3584, inner=3072, experts=2, tp=8).moe_config
    assert check_moe_marlin_supports_config(moe, 32, allow_tile_padding=True)
    supported, reason = cls.is_supported_config(
        cls, moe, kInt4Static32, None, FusedMoEActivationFormat.Standard
    )
    assert (supported, reason) == (STOCK[name] is None, STOCK[name])


def test_what_stock_chooses_from():
    """CUTLASS and AITER are not among them; Humming cannot be asked without its package."""
    chosen = {backend.value for backend in int_wna16._get_priority_backends()}
    assert chosen == {"CPU", "ZEN_CPU"}
    assert {backend.value for backend in int_wna16.WNA16MoEBackend} - chosen == {
        *("MARLIN", "BATCHED_MARLIN", "HUMMING", "FLASHINFER_TRTLLM"),
        *("TRITON", "XPU", "EMULATION", "RDNA3"),
    }


def test_upstreams_flydsl_method_computes_silu():
    """Why `--moe-backend flydsl` is refused on gfx950 for these experts."""
    flydsl = import_module("vllm.model_executor.layers.fused_moe.fused_flydsl_moe")
    assert 'act="silu"' in inspect.getsource(flydsl)


def test_stock_has_nothing_for_them_on_a_cpu():
    """Without the amendment the layer ends where upstream's choice of kernels ends."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_moe

    stock = compressed_tensors_moe.CompressedTensorsMoEMethod.get_moe_method.__wrapped__
    layer = build()
    with (
        rank_of(make_config(None)),
        pytest.raises(NotImplementedError, match="No WNA16 MoE backend supports"),
    ):
        stock(packed_quant(), layer, layer.layer_name)
