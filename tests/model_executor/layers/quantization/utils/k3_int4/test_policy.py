# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The decision itself: every reason to refuse the flag, and that without it nothing is decided."""

from types import SimpleNamespace

import pytest

from vllm.config import VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.quantization.utils.k3_int4 import policy
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import Int4RefusedError, Target

INT4 = "int4_per_group_32"


def make_config(*, moe=INT4, ignore=(), additional=None, text=None, **model):
    """What `check_config` reads of a configuration; Kimi-K3 unless told otherwise."""
    args = moe and QuantizationConfigArgs(
        moe={"weight": moe} if isinstance(moe, str) else moe, ignore=list(ignore)
    )
    sizes = {"hidden_act": "situ", "num_hidden_layers": 4}
    sizes |= {"first_k_dense_replace": 1, "moe_layer_freq": 1}
    given = {"architecture": "KimiLinearForCausalLM", "quantization": "mxfp4"} | model
    return SimpleNamespace(
        additional_config={} if additional is None else additional,
        model_config=SimpleNamespace(
            quantization_config=args,
            hf_text_config=SimpleNamespace(**sizes | (text or {})),
            **given,
        ),
    )


@pytest.mark.parametrize(
    ("moe", "asked"), [(None, False), ("mxfp4", False), ("fp8_per_token", False), (INT4, True)]
)
def test_only_the_flag_asks(moe, asked):
    assert policy.is_requested(make_config(moe=moe)) is asked


def test_no_configuration_asks_for_nothing():
    assert not policy.is_requested(None)
    assert not policy.is_requested(SimpleNamespace(model_config=None))


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "cuda", None])
def test_without_the_flag_nothing_is_looked_at(on_gpu, monkeypatch, architecture):
    """Not even an unknown scale rule; a model of any kind passes on any platform."""
    if architecture:
        on_gpu(architecture, None)
    monkeypatch.setenv(policy.RULE_VARIABLE, "nonsense")
    config = make_config(moe=None, architecture="LlamaForCausalLM", quantization=None)
    policy.check_config(config)
    assert config.additional_config == {}


@pytest.mark.parametrize("architecture", policy.ARCHITECTURES)
def test_kimi_k3_on_a_cpu_passes_and_carries_its_rule(architecture):
    config = make_config(architecture=architecture)
    policy.check_config(config)
    assert config.additional_config == {policy.RULE_KEY: "mse"}


def test_environment_reaches_workers_through_the_configuration(monkeypatch):
    """Workers on other hosts have another environment."""
    monkeypatch.setenv(policy.RULE_VARIABLE, "absmax")
    config = make_config()
    policy.check_config(config)
    monkeypatch.delenv(policy.RULE_VARIABLE)
    assert policy.scale_rule(config) == "absmax"
    # Checked again in a worker that has the variable: the same rule twice is no conflict.
    monkeypatch.setenv(policy.RULE_VARIABLE, "absmax")
    policy.check_config(config)


@pytest.mark.parametrize(
    ("additional", "variable", "found"),
    [
        ({policy.RULE_KEY: "Mse"}, None, "'Mse'"),
        ({policy.RULE_KEY: 3}, None, "= 3;"),
        ({}, "", "= ''"),
        ({policy.RULE_KEY: "mse"}, "absmax", "'mse' but"),
    ],
)
def test_unknown_and_contradicting_rules(monkeypatch, additional, variable, found):
    if variable is not None:
        monkeypatch.setenv(policy.RULE_VARIABLE, variable)
    with pytest.raises(Int4RefusedError, match=found):
        policy.check_config(make_config(additional=additional))


REFUSED = {
    "model": ({"architecture": "DeepseekV4ForCausalLM"}, "the model DeepseekV4ForCausalLM"),
    "no architecture": ({"architecture": None}, "the model None"),
    "bf16": ({"quantization": None}, "unquantized weights"),
    "int4 already": (
        {"quantization": "compressed-tensors"},
        "a checkpoint with compressed-tensors",
    ),
    "activation": ({"text": {"hidden_act": "silu"}}, "hidden_act 'silu'"),
    "override": ({"moe": {"weight": INT4, "activation": "mxfp8"}}, "moe.activation override"),
    "no MoE": ({"text": {"first_k_dense_replace": 4}}, "a model without MoE layers"),
    "all ignored": ({"ignore": ["*experts*"]}, "holds all 3 MoE layers"),
    "all named": (
        {"ignore": [f"model.layers.{i}.block_sparse_moe.experts" for i in (1, 2, 3)]},
        "holds all 3 MoE layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_whatever_the_platform(name):
    changes, found = REFUSED[name]
    with pytest.raises(Int4RefusedError) as refused:
        policy.check_config(make_config(**changes))
    message = str(refused.value)
    assert message.startswith(f"{policy.FLAG} is refused: found ")
    assert found in message
    assert "; needed: " in message
    assert message.endswith(".")


def test_a_list_that_spares_some_passes():
    policy.check_config(make_config(ignore=["model.layers.1.*", "re:.*self_attn.*"]))


@pytest.mark.parametrize(
    ("architecture", "aiter", "found"),
    [
        ("cuda", None, "the platform NVIDIA cuda"),
        ("gfx950", "new", "the GPU gfx950"),
        ("gfx1250", "new", "the GPU gfx1250"),
        ("gfx942", None, "no AITER"),
    ],
)
def test_refused_by_the_platform(on_gpu, architecture, aiter, found):
    on_gpu(architecture, aiter)
    with pytest.raises(Int4RefusedError, match=found):
        policy.check_config(make_config())


def test_targets():
    assert policy.find_target() is Target.CPU


def test_gfx942_with_aiter(on_gpu):
    on_gpu("gfx942")
    assert policy.find_target() is Target.GFX942
    policy.check_config(make_config())


@pytest.mark.parametrize(
    ("sizes", "target", "native"),
    [
        ((3584, 384), Target.GFX942, (3584, 384)),
        ((3584, 192), Target.GFX942, None),
        ((3600, 384), Target.GFX942, None),
        ((3584, 384), Target.CPU, (3584, 384)),
        ((128, 32), Target.CPU, (128, 64)),
    ],
)
def test_native_sizes(sizes, target, native):
    assert policy.native_sizes(*sizes, target) == native


def test_every_configuration_is_checked(monkeypatch):
    """The real `VllmConfig` runs the check before anything else of its verification."""
    seen = []
    monkeypatch.setattr(policy, "check_config", seen.append)
    config = VllmConfig()
    assert seen == [config]
