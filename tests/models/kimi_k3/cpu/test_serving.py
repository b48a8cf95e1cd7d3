# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What is settled or refused before a Kimi-K3 engine starts on a CPU."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from k3_checkpoint.presets import PRESETS
from vllm.models.kimi_k3.cpu.serving import configure, model_problems
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

TINY = replace(PRESETS["tiny"], vision=None)


def vllm_config(model="nowhere", **changes) -> SimpleNamespace:
    """The fields of a `VllmConfig` that are looked at."""
    config = KimiLinearConfig(**TINY.config())
    fields = {
        "model_config": SimpleNamespace(hf_config=config, model=str(model)),
        "speculative_config": None,
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=True),
        "attention_config": SimpleNamespace(backend=None),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, enable_expert_parallel=False),
        "load_config": SimpleNamespace(load_format="auto"),
    }
    return SimpleNamespace(**(fields | changes))


def test_caching_and_chunking_are_switched_off_with_one_line(caplog_vllm):
    made = vllm_config()
    configure(made)
    assert made.cache_config.enable_prefix_caching is False
    assert made.scheduler_config.enable_chunked_prefill is False
    assert made.attention_config.backend is AttentionBackendEnum.CPU_MLA
    (line,) = caplog_vllm()
    assert line.startswith("Kimi-K3 on a CPU: prefix caching and chunked prefill switched off")
    configure(made)
    assert caplog_vllm() == [line]


def test_a_chosen_attention_backend_is_kept():
    made = vllm_config(attention_config=SimpleNamespace(backend=AttentionBackendEnum.AMX_MLA))
    configure(made)
    assert made.attention_config.backend is AttentionBackendEnum.AMX_MLA


def test_speculative_decoding_is_refused():
    with pytest.raises(ValueError, match="Start without --speculative-config"):
        configure(vllm_config(speculative_config=object()))


def test_an_incomplete_local_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no model.safetensors.index.json and no"):
        configure(vllm_config(tmp_path))


def test_only_formats_that_read_safetensors_are_checked(tmp_path):
    configure(vllm_config(tmp_path, load_config=SimpleNamespace(load_format="dummy")))


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({"hidden_size": 100}, 1, "hidden_size / num_attention_heads: expected an even .*found 25"),
        ({"hidden_act": "gelu"}, 1, "hidden_act: expected one of .*, found 'gelu'"),
        ({"kv_lora_rank": 256}, 1, r"expected \(512, 64\).*found \(256, 64\)"),
        (
            {"num_attention_heads": 6, "moe_intermediate_size": 128},
            4,
            "num_attention_heads: expected a multiple of .* 4, found 6",
        ),
        ({"moe_intermediate_size": 96}, 2, "expected a multiple of 64 .*, found 96"),
    ],
)
def test_problems_are_named(change, ranks, message):
    config = TINY.config() | change
    (problem,) = model_problems(config, ranks=ranks, expert_parallel=False)
    assert re.search(message, problem), problem


def test_low_rank_gates_are_no_kimi_k3():
    config = TINY.config()
    config["linear_attn_config"]["use_full_rank_gate"] = False
    (problem,) = model_problems(config, ranks=1, expert_parallel=False)
    assert problem.startswith("linear_attn_config.use_full_rank_gate")


def test_experts_that_are_spread_need_not_be_split():
    config = TINY.config() | {"moe_intermediate_size": 96}
    assert not list(model_problems(config, ranks=2, expert_parallel=True))


def test_a_stack_without_attention_has_no_latent_shape():
    config = TINY.config() | {"kv_lora_rank": 8}
    config["linear_attn_config"] |= {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}
    assert not list(model_problems(config, ranks=1, expert_parallel=False))
