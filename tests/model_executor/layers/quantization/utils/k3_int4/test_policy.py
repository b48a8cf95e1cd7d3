# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The decision itself: every reason to refuse the flag, and that without it nothing is decided;
from facts alone, and from what the engine gathers."""

from types import SimpleNamespace

import pytest

from k3_checkpoint.formats import IGNORED_LAYERS, Format
from vllm.config import VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.quantization.utils.k3_int4 import facts, policy
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import (
    BY_CHECKPOINT,
    BY_FLAG,
    Aiter,
    Facts,
    Int4RefusedError,
    Layer,
    Machine,
    Model,
    Platform,
    Target,
    decide,
)
from vllm_overlay import OverlayMismatchError

INT4 = "int4_per_group_32"


def make_config(*, moe=INT4, ignore=(), additional=None, text=None, listed=(), **model):
    """What `check_config` reads of a configuration; Kimi-K3 unless told otherwise."""
    args = moe and QuantizationConfigArgs(
        moe={"weight": moe} if isinstance(moe, str) else moe, ignore=list(ignore)
    )
    sizes = {"hidden_act": "situ", "num_hidden_layers": 4}
    sizes |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 8}
    given = {"architecture": "KimiLinearForCausalLM", "quantization": "mxfp4"} | model
    described = {"quant_method": "compressed-tensors", "ignore": [*IGNORED_LAYERS, *listed]}
    return SimpleNamespace(
        additional_config={} if additional is None else additional,
        kernel_config=SimpleNamespace(moe_backend="auto"),
        model_config=SimpleNamespace(
            dtype="torch.bfloat16",
            hf_config=SimpleNamespace(quantization_config=described),
            quantization_config=args,
            hf_text_config=SimpleNamespace(**sizes | (text or {})),
            **given,
        ),
    )


@pytest.mark.parametrize(
    ("moe", "asked"), [(None, False), ("mxfp4", False), ("fp8_per_token", False), (INT4, True)]
)
def test_only_the_flag_asks(moe, asked):
    assert facts.is_requested(make_config(moe=moe)) is asked


def test_no_configuration_asks_for_nothing():
    assert not facts.is_requested(None)
    assert not facts.is_requested(SimpleNamespace(model_config=None))


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "cuda", None])
def test_without_the_flag_nothing_is_looked_at(on_gpu, monkeypatch, architecture):
    """Not even an unknown scale rule; a model of any kind passes on any platform."""
    if architecture:
        on_gpu(architecture, None)
    monkeypatch.setenv(facts.RULE_VARIABLE, "nonsense")
    config = make_config(moe=None, architecture="LlamaForCausalLM", quantization=None)
    facts.check_config(config)
    assert config.additional_config == {}


@pytest.mark.parametrize("architecture", policy.ARCHITECTURES)
def test_kimi_k3_on_a_cpu_passes_and_carries_its_rule(architecture):
    config = make_config(architecture=architecture)
    facts.check_config(config)
    assert config.additional_config == {facts.RULE_KEY: "mse"}


def test_environment_reaches_workers_through_the_configuration(monkeypatch):
    """Workers on other hosts have another environment."""
    monkeypatch.setenv(facts.RULE_VARIABLE, "absmax")
    config = make_config()
    facts.check_config(config)
    monkeypatch.delenv(facts.RULE_VARIABLE)
    assert facts.scale_rule(config) == "absmax"
    # Checked again in a worker that has the variable: the same rule twice is no conflict.
    monkeypatch.setenv(facts.RULE_VARIABLE, "absmax")
    facts.check_config(config)


@pytest.mark.parametrize(
    ("additional", "variable", "found"),
    [
        ({facts.RULE_KEY: "Mse"}, None, "'Mse'"),
        ({facts.RULE_KEY: 3}, None, "= 3;"),
        ({facts.RULE_KEY: "mse"}, "absmax", "'mse' but"),
    ],
)
def test_unknown_and_contradicting_rules(monkeypatch, additional, variable, found):
    if variable is not None:
        monkeypatch.setenv(facts.RULE_VARIABLE, variable)
    with pytest.raises(Int4RefusedError, match=found):
        facts.check_config(make_config(additional=additional))


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
        facts.check_config(make_config(**changes))
    message = str(refused.value)
    assert message.startswith(f"{policy.FLAG} is refused: found ")
    assert found in message
    assert "; needed: " in message
    assert message.endswith(".")


def test_a_list_that_spares_some_passes():
    facts.check_config(make_config(ignore=["model.layers.1.*", "re:.*self_attn.*"]))


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
        facts.check_config(make_config())


def test_gfx942_with_aiter(on_gpu):
    on_gpu("gfx942")
    facts.check_config(make_config())


def test_an_empty_variable_is_unset(monkeypatch):
    monkeypatch.setenv(facts.RULE_VARIABLE, "")
    config = make_config()
    facts.check_config(config)
    assert config.additional_config == {facts.RULE_KEY: "mse"}


def test_workers_take_the_configurations_rule(monkeypatch):
    """Theirs may be another environment; what was checked once is not asked again."""
    config = make_config(additional={facts.RULE_KEY: "absmax"})
    facts.check_config(config)
    monkeypatch.setenv(facts.RULE_VARIABLE, "mse")
    assert facts.scale_rule(config) == "absmax"


def test_a_rule_that_cannot_be_carried_is_refused(monkeypatch):
    monkeypatch.setenv(facts.RULE_VARIABLE, "absmax")
    with pytest.raises(Int4RefusedError, match="which carries the rule to workers"):
        facts.check_config(make_config(additional=object()))


@pytest.mark.parametrize("name", ["quantization_config", "moe", "weight"])
def test_a_renamed_field_is_not_read_as_not_asked_for(name):
    config = make_config()
    owners = {
        "quantization_config": config.model_config,
        "moe": SimpleNamespace(ignore=[]),
        "weight": SimpleNamespace(activation=None),
    }
    if name == "quantization_config":
        del config.model_config.quantization_config
    elif name == "moe":
        config.model_config.quantization_config = owners["moe"]
    else:
        config.model_config.quantization_config = SimpleNamespace(moe=owners["weight"])
    with pytest.raises(OverlayMismatchError, match=f"SimpleNamespace.{name}"):
        facts.check_config(config)


@pytest.mark.parametrize("on", [None, "gfx942"])
@pytest.mark.parametrize(
    "listed",
    [
        "re:.*layers.2.*",
        "model.layers.1.block_sparse_moe.experts.7.w2",
        "re:.*experts.7.w3",
    ],
)
def test_a_checkpoints_list_that_touches_experts_is_refused(on_gpu, on, listed):
    """Their weights are not MXFP4, whatever runs them."""
    if on:
        on_gpu(on)
    with pytest.raises(Int4RefusedError, match=r"in config\.json's ignore list"):
        facts.check_config(make_config(listed=[listed]))


def test_a_checkpoints_list_of_other_layers_passes():
    facts.check_config(make_config(listed=["re:.*vision.*", "model.embed_tokens"]))


CAN = Aiter(found=True, fused_moe=True)
CPU, CUDA = Machine(Platform.CPU), Machine(Platform.OTHER, "NVIDIA")
SITU = Layer("situ", {"activation_situ_beta": 4.0}, hidden=3584, inner=384)


def gpu(architecture: str, aiter: Aiter = CAN) -> Machine:
    return Machine(Platform.ROCM, architecture=architecture, aiter=aiter)


@pytest.mark.parametrize(
    ("asked", "machine", "backend", "target"),
    [
        (None, gpu("gfx942"), "auto", None),
        (None, CPU, "auto", None),
        (BY_FLAG, CPU, "auto", Target.CPU),
        (BY_FLAG, CPU, "cpu", Target.CPU),
        (BY_FLAG, gpu("gfx942"), "aiter", Target.GFX942),
        (BY_CHECKPOINT, CPU, "auto", Target.CPU),
        (BY_CHECKPOINT, CPU, "triton", None),
        (BY_CHECKPOINT, gpu("gfx942"), "auto", Target.GFX942),
        (BY_CHECKPOINT, gpu("gfx942", Aiter(found=False)), "emulation", None),
        (BY_CHECKPOINT, gpu("gfx950"), "auto", None),
        (BY_CHECKPOINT, CUDA, "auto", None),
    ],
)
def test_used_or_left_to_upstream(asked, machine, backend, target):
    decision = decide(Facts(asked, machine, backend, layer=SITU))
    assert decision.target is target
    assert decision.refusals == ()
    assert decision.require() is target


def test_all_reasons_are_told_and_the_first_is_raised():
    layer = Layer("situ", {"activation_situ_beta": None}, hidden=96, inner=48)
    decision = decide(Facts(BY_FLAG, CPU, layer=layer))
    assert [refusal.found for refusal in decision.refusals] == [
        "no activation_situ_beta in the model's config.json",
        "an intermediate size of 48 per rank",
        "a (latent) hidden size of 96",
    ]
    assert decision.target is None
    with pytest.raises(Int4RefusedError, match="found no activation_situ_beta"):
        decision.require()


def test_facts_that_are_not_known_are_not_judged():
    """`kimi-k3 doctor` knows no layer, and the API server has not imported AITER."""
    model = Model(policy.ARCHITECTURES[0], "mxfp4")
    assert decide(Facts(BY_FLAG, gpu("gfx942"), model=model)).target is Target.GFX942
    packed = Model(policy.ARCHITECTURES[0], experts=Format.MIXED)
    assert decide(Facts(BY_CHECKPOINT, gpu("gfx942"), model=packed)).refusals
    assert not decide(Facts(BY_CHECKPOINT, gpu("gfx950"), model=packed)).refusals


def test_every_configuration_is_checked(monkeypatch):
    """The real `VllmConfig` runs the check before anything else of its verification."""
    seen = []
    monkeypatch.setattr(facts, "check_config", seen.append)
    config = VllmConfig()
    assert seen == [config]
