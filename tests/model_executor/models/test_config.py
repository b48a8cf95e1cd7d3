# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Configuration of Kimi-K3 checkpoints: the MXFP4 route and the CPU's limits."""

from types import SimpleNamespace

import pytest
import torch

from k3_checkpoint.spec import quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.model_executor.models.config import MODELS_CONFIG_MAP


@pytest.mark.parametrize(
    "architecture", ["KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"]
)
def test_mxfp4_checkpoints_are_routed_to_the_mxfp4_interface(architecture):
    config = SimpleNamespace(quantization_config=quantization_config())
    model = SimpleNamespace(hf_config=config, hf_text_config=config, model_arch_config=config)
    MODELS_CONFIG_MAP[architecture].verify_and_update_model_config(model)
    assert config.quantization_config["quant_method"] == "mxfp4"


def test_other_formats_keep_their_route():
    config = SimpleNamespace(
        quantization_config=quantization_config() | {"format": "pack-quantized"}
    )
    model = SimpleNamespace(hf_config=config, hf_text_config=config, model_arch_config=config)
    MODELS_CONFIG_MAP["KimiLinearForCausalLM"].verify_and_update_model_config(model)
    assert config.quantization_config["quant_method"] == "compressed-tensors"


def test_mxfp4_experts_compute_in_float32_on_a_cpu():
    assert torch.float32 in Mxfp4Config.get_supported_act_dtypes()
    assert GptOssMxfp4Config.get_supported_act_dtypes() == [torch.bfloat16]
