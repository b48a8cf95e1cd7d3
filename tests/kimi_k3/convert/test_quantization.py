# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""config.json of the result: what is changed, what is kept, what the library makes of it."""

import copy
import json

import pytest
from compressed_tensors.quantization import QuantizationConfig

from k3_checkpoint.presets import PRESETS
from kimi_k3.convert.quantization import check_config, converted_config
from tests.kimi_k3.convert.support.files import quantization

INT4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
}


def test_only_the_format_and_the_weights_change():
    source = {"model_type": "kimi", "quantization_config": quantization(), "x": [1, {"y": None}]}
    before = copy.deepcopy(source)
    result = converted_config(source, {"experts"}, set())
    assert source == before
    expected = copy.deepcopy(source)
    found = expected["quantization_config"]
    found["format"] = found["config_groups"]["group_0"]["format"] = "pack-quantized"
    found["config_groups"]["group_0"]["weights"] = INT4
    assert result == expected
    parsed = QuantizationConfig.model_validate(result["quantization_config"])
    assert parsed.config_groups["group_0"].weights.num_bits == 4
    assert parsed.ignore == ["lm_head", "re:.*self_attn.*"]


def test_both_places_of_a_multimodal_model():
    config = PRESETS["k3-shapes"].config() | {"quantization_config": quantization()}
    assert list(check_config(config)) == []
    result = converted_config(config, {"experts"}, set())
    for place in (result, result["text_config"]):
        assert place["quantization_config"]["format"] == "pack-quantized"
        assert place["quantization_config"]["config_groups"]["group_0"]["weights"] == INT4


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_wherever_it_stands_and_whatever_it_is_called(key):
    config = {"models": [{"a": 1}, {"inner": {key: quantization()}}], "x": {key: None}}
    assert list(check_config(config)) == []
    found = converted_config(config, {"experts"}, set())
    assert found["models"][1]["inner"][key]["format"] == "pack-quantized"
    config["models"][1]["inner"][key]["quant_method"] = "awq"
    [problem] = check_config(config)
    assert problem.startswith(f"models.1.inner.{key}: quant_method")


def test_groups_in_other_formats_are_kept():
    config = quantization()
    fp8 = {
        "targets": ["re:.*self_attn.*"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
    }
    config["format"] = "mixed-precision"
    config["config_groups"]["fp8"] = copy.deepcopy(fp8)
    source = {"quantization_config": config}
    assert list(check_config(source)) == []
    found = converted_config(source, {"experts"}, set())["quantization_config"]
    assert found["format"] == "mixed-precision"
    assert found["config_groups"]["fp8"] == fp8
    assert found["config_groups"]["group_0"]["format"] == "pack-quantized"


def test_what_may_be_left_out_is_understood_and_written():
    config = quantization()
    group = config["config_groups"]["group_0"]
    group["weights"] = {"num_bits": 4, "type": "float", "group_size": 32}
    del group["format"]
    assert list(check_config({"quantization_config": config})) == []
    found = converted_config({"quantization_config": config}, {"experts"}, set())
    assert found["quantization_config"]["config_groups"]["group_0"]["weights"] == INT4


def test_activations_are_not_quantized_any_more():
    config = quantization()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float"}
    found = converted_config({"quantization_config": config}, {"experts"}, set())
    assert found["quantization_config"]["config_groups"]["group_0"]["input_activations"] is None


def test_a_group_of_the_source_is_never_overwritten():
    config = quantization()
    config["config_groups"] = {"int4": config["config_groups"]["group_0"]}
    found = converted_config({"quantization_config": config}, {"a.experts"}, {"b.experts"})
    groups = found["quantization_config"]["config_groups"]
    assert [group["format"] for group in groups.values()] == [
        "pack-quantized",
        "mxfp4-pack-quantized",
    ]
    assert groups["int4"]["targets"] == ["Linear"]


@pytest.mark.parametrize("other", ["nvfp4-pack-quantized", "pack-quantized"])
def test_groups_that_pack_under_the_same_name_are_refused(other):
    config = quantization()
    config["format"] = "mixed-precision"
    config["config_groups"]["other"] = {"targets": ["x"], "format": other, "weights": {}}
    assert any(f"{other} beside" in p for p in check_config({"quantization_config": config}))


@pytest.mark.parametrize("value", [7, [], "mxfp4", {"quant_method": "mxfp4"}])
def test_no_description_at_all(value):
    text = json.dumps({"text_config": {"quantization_config": value}})
    [problem] = check_config(json.loads(text))
    assert problem.startswith("text_config.quantization_config: quant_method: expected compressed")
