# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""config.json of whatever kind: a Kimi-K3's passes, anything else is refused by name."""

import json

import pytest

from k3_checkpoint.presets import PRESETS
from kimi_k3.rehearsal.config import check_config, read_config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_kimi_k3_passes(preset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[preset].config()))
    assert read_config(tmp_path) == PRESETS[preset].config()


@pytest.mark.parametrize("content", ["[1, 2]", "null", "5", "{", "\xff"])
def test_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json: expected (a )?JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", "64"),
        ("hidden_size", float("nan")),
        ("hidden_size", 10**30),
        ("num_hidden_layers", -1),
        ("vocab_size", 1.5),
        ("num_experts", 0),
        ("num_experts", True),
        ("num_experts", None),
        ("first_k_dense_replace", None),
        ("moe_layer_freq", 0),
        ("kv_lora_rank", -5),
        ("linear_attn_config", None),
        ("linear_attn_config", []),
        ("quantization_config", None),
    ],
)
def test_parts_and_sizes_that_none_has(name, value):
    config = PRESETS["tiny"].config()
    config.get("text_config", config)[name] = value
    with pytest.raises(ValueError, match=f"expected a Kimi-K3: .*{name}: expected"):
        check_config(config)


@pytest.mark.parametrize("layers", [[0], [99], ["a"], None])
def test_layers_that_there_are_not(layers):
    config = PRESETS["tiny"].config()
    config.get("text_config", config)["linear_attn_config"]["kda_layers"] = layers
    with pytest.raises(ValueError, match="kda_layers: expected a list of layers"):
        check_config(config)


def test_text_that_is_no_object():
    with pytest.raises(ValueError, match="text_config: expected an object"):
        check_config({"text_config": []})
