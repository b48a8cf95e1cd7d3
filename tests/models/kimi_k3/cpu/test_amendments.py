# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""On the CPU platform, upstream's names lead to the torch forms."""

import pytest
import torch
from torch import nn

import vllm.models.kimi_k3 as kimi_k3
from vllm.model_executor.models import ModelRegistry
from vllm.models.kimi_k3.amd import kda, kda_metadata, linear, model, mtp
from vllm.models.kimi_k3.amd.ops.kda_chunk import is_fused_kda_chunk_supported
from vllm.models.kimi_k3.amd.ops.kda_decode import is_fused_kda_decode_supported
from vllm.models.kimi_k3.cpu import attn_res, ops


def test_the_registry_finds_the_portable_classes():
    assert kimi_k3.KimiLinearForCausalLM is linear.KimiLinearForCausalLM
    assert kimi_k3.KimiK3ForConditionalGeneration is model.KimiK3ForConditionalGeneration
    assert kimi_k3.KimiK3MTP is mtp.KimiK3MTP
    for name in ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"):
        assert ModelRegistry.models[name].load_model_cls() is getattr(kimi_k3, name)


def test_layers_hold_the_torch_operations():
    assert kda.chunk_kda_prefill is ops.chunk_kda_prefill
    assert kda.fused_recurrent_kda is ops.fused_recurrent_kda
    assert kda.fused_recurrent_kda_packed_decode is ops.fused_recurrent_kda_packed_decode
    assert kda_metadata.prepare_chunk_metadata_device is ops.prepare_chunk_metadata_device
    assert linear.attn_res is attn_res.attn_res


def test_no_fused_gpu_kernel_is_offered():
    assert not is_fused_kda_chunk_supported()
    assert not is_fused_kda_decode_supported(12, 128, 4, 0, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("mlp_res_proj", True),
        ("output_attn_res_proj", True),
        ("routed_expert_up_proj", True),
        ("routed_expert_down_proj", False),
        ("o_proj", False),
    ],
)
def test_weights_that_the_model_reads_are_kept(name, kept):
    model = nn.ModuleDict({"model": nn.ModuleDict({name: nn.Linear(2, 2)})})
    linear._mark_read_directly(model)
    assert getattr(model["model"][name], "_cpu_skip_gemm_dispatch", False) is kept
