# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which checkpoints are taken for packed int4 experts; what is refused before an engine starts."""

from types import SimpleNamespace

import pytest
import torch

from k3_checkpoint.formats import Format
from tests.models.kimi_k3.support.simulated_gpu.int4_support import packed_description
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.quantization.utils.k3_int4 import expert_format, facts, policy
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import Int4RefusedError, Target


def make_config(described=None, *, flag=None, inside_text=False, **changes):
    """What `check_config` reads of a configuration: a packed Kimi-K3 unless told otherwise."""
    described = packed_description() if described is None else described
    text = SimpleNamespace(hidden_act="situ", num_hidden_layers=4, num_experts=2)
    text.first_k_dense_replace, text.moe_layer_freq = 1, 1
    whole = SimpleNamespace() if inside_text else text
    text.quantization_config = described
    given = {"architecture": "KimiLinearForCausalLM", "dtype": torch.bfloat16} | changes
    return SimpleNamespace(
        additional_config={},
        kernel_config=SimpleNamespace(moe_backend=given.pop("moe_backend", "auto")),
        model_config=SimpleNamespace(
            quantization="compressed-tensors",
            quantization_config=flag and QuantizationConfigArgs(moe={"weight": flag}),
            hf_config=whole,
            hf_text_config=text,
            **given,
        ),
    )


@pytest.mark.parametrize("inside_text", [False, True])
def test_a_packed_checkpoint_is_told_from_its_config(inside_text):
    found = expert_format.declared_int4(make_config(inside_text=inside_text).model_config)
    assert found is Format.INT4


MXFP4 = {"targets": ["Linear"], "format": "mxfp4-pack-quantized"}
OTHERS = {
    "eight bits": packed_description(num_bits=8),
    "floats": packed_description(type="float"),
    "asymmetric": packed_description(symmetric=False),
    "wide groups": packed_description(group_size=64),
    "channels": packed_description(strategy="channel", group_size=None),
    "reordered": packed_description(actorder="group"),
    "not packed": packed_description({"format": "int-quantized"}),
    "MXFP4": packed_description(MXFP4 | {"weights": {"num_bits": 4, "type": "float"}}),
    "another method": packed_description() | {"quant_method": "awq"},
    "no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "activations too": packed_description(
        {"input_activations": {"num_bits": 8, "type": "int", "strategy": "token"}}
    ),
    "nothing": {},
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_not(name):
    assert expert_format.declared_int4(make_config(OTHERS[name]).model_config) is None


@pytest.mark.parametrize("architecture", ["cpu", "gfx942", "gfx950", "cuda"])
def test_a_packed_checkpoint_needs_no_flag(on_gpu, architecture):
    if architecture != "cpu":
        on_gpu(architecture, "new" if architecture == "gfx942" else None)
    facts.check_config(make_config())


def test_with_the_flag_it_is_refused():
    """Nothing can be converted, and a scale rule or ignore list beside the flag would be lost."""
    with pytest.raises(Int4RefusedError) as refused:
        facts.check_config(make_config(flag="int4_per_group_32"))
    message = str(refused.value)
    assert message.startswith(
        f"{policy.FLAG} is refused: found a checkpoint whose experts are int4"
    )
    assert message.endswith("the checkpoint is served as it is, with the scales it holds.")


@pytest.mark.parametrize(
    ("gpu", "changes", "found"),
    [
        ({"aiter": None}, {}, "found no AITER in this environment"),
        ({"enabled": False}, {}, "AITER's fused MoE switched off"),
        ({}, {"dtype": torch.float32}, "activations in torch.float32"),
    ],
)
def test_refused_on_gfx942(on_gpu, gpu, changes, found):
    on_gpu("gfx942", **gpu)
    with pytest.raises(Int4RefusedError) as refused:
        facts.check_config(make_config(**changes))
    message = str(refused.value)
    assert message.startswith("the checkpoint of packed int4 experts is refused: found ")
    assert found in message
    assert "without the flag" not in message


def test_mxfp4_beside_int4_is_refused_on_gfx942_alone(on_gpu):
    mixed = packed_description()
    mixed["config_groups"]["group_1"] = MXFP4 | {"weights": {"num_bits": 4, "type": "float"}}
    facts.check_config(make_config(mixed))
    on_gpu("gfx942")
    with pytest.raises(Int4RefusedError, match="without --include and --exclude"):
        facts.check_config(make_config(mixed))


@pytest.mark.parametrize(
    ("architecture", "backend", "target"),
    [
        ("cpu", "auto", Target.CPU),
        ("cpu", "cpu", Target.CPU),
        ("cpu", "triton", None),
        ("gfx942", "auto", Target.GFX942),
        ("gfx942", "aiter", Target.GFX942),
        ("gfx942", "emulation", None),
        ("gfx950", "auto", None),
        ("gfx942", "flydsl", None),
        ("gfx950", "emulation", None),
        ("cuda", "auto", None),
    ],
)
def test_targets(on_gpu, architecture, backend, target):
    """An explicit backend of upstream's is upstream's, and so is every other GPU."""
    if architecture != "cpu":
        on_gpu(architecture)
    assert facts.find_packed_target(backend) is target


def test_upstreams_backend_needs_no_aiter(on_gpu):
    on_gpu("gfx942", None)
    facts.check_config(make_config(moe_backend="emulation"))


def test_a_kernel_that_would_compute_silu_is_refused(on_gpu):
    """`fused_flydsl_moe` names SiLU in its call of AITER, and upstream asks for no activation."""
    on_gpu("gfx950")
    with pytest.raises(Int4RefusedError, match="a kernel that computes SiTU"):
        facts.check_config(make_config(moe_backend="flydsl"))
