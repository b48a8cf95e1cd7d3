# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Some layers int4, the others MXFP4: chosen by globs, written down so that both are read right."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from kimi_k3.convert import (
    ConversionFailed,
    ConvertOptions,
    convert_checkpoint,
)
from kimi_k3.convert.selection import container, select
from kimi_k3.convert.source import read_source
from tests.kimi_k3.convert.support.files import all_tensors, digests


@pytest.fixture(scope="module")
def mixed(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed") / "out"
    convert_checkpoint(source, folder, ConvertOptions(include=("*layers.2.*",), verify=True))
    return folder


def test_the_chosen_layer_is_int4_and_the_other_as_it_was(source, result, mixed):
    then, whole, now = (all_tensors(folder) for folder in (source, result, mixed))
    for name, tensor in now.items():
        origin = whole if ".layers.2." in name else then
        assert torch.equal(tensor, origin[name]), name
    assert not any(".layers.1." in name and name.endswith("weight_shape") for name in now)


def test_exclude_says_the_same_the_other_way_round(source, mixed, tmp_path):
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(exclude=("model.layers.1.*",)))
    now, then = digests(tmp_path / "out"), digests(mixed)
    assert now.pop("kimi_k3_conversion.json") != then.pop("kimi_k3_conversion.json")
    assert now == then


def test_vllm_reads_the_right_scheme_for_each_layer(mixed):
    """vLLM's own parsing of config.json, and its choice by the names it asks for."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    config = json.loads((mixed / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    QuantizationConfig.model_validate(config)
    parsed = CompressedTensorsConfig.from_config(config)
    parsed._add_fused_moe_to_target_scheme_map()
    layer = type("RoutedExperts", (torch.nn.Module,), {})()
    for number, (format_, kind) in {
        1: ("mxfp4-pack-quantized", "float"),
        2: ("pack-quantized", "int"),
    }.items():
        name = f"model.layers.{number}.block_sparse_moe.experts.0.w1"
        scheme = parsed.get_scheme_dict(layer, name)
        assert scheme is not None
        assert scheme["format"] == format_
        assert scheme["weights"].type == kind


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        (("*.w1",), (), r"experts: 4 of its 12 modules are chosen; expected all or none"),
        (("*experts.0.*",), (), r"experts: 3 of its 12 modules are chosen"),
        (("*layers.7.*",), (), r"'\*layers.7.\*': matches none of 24 modules"),
        ((), ("*",), "leave nothing to convert"),
    ],
)
def test_what_nothing_could_load_is_refused(source, tmp_path, include, exclude, message):
    with pytest.raises(ConversionFailed, match=message):
        convert_checkpoint(
            source, tmp_path / "out", ConvertOptions(include=include, exclude=exclude)
        )
    assert not (tmp_path / "out").exists()


def test_all_is_chosen_when_nothing_is_said(source):
    modules = read_source(source).modules
    chosen = select(modules)
    assert chosen.modules == modules
    assert not chosen.kept
    assert len(chosen.converted) == 2


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (
            "model.layers.1.block_sparse_moe.experts.17.w2",
            "model.layers.1.block_sparse_moe.experts",
        ),
        ("experts.0.w1", "experts"),
        ("model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.shared_experts.up_proj"),
        ("a.experts.0.b.experts.1.c", "a.experts.0.b.experts"),
    ],
)
def test_what_is_loaded_together(module, name):
    assert container(module) == name


def test_names_are_quoted_in_patterns():
    from kimi_k3.convert.quantization import target

    pattern = target("a.b+c.experts").removeprefix("re:")
    assert re.match(pattern, "a.b+c.experts.12.w1")
    for other in ("a.b+c.experts.x.w1", "aXb+c.experts.1.w1", "z.a.b+c.experts.1.w1"):
        assert not re.match(pattern, other)
    assert target("model.proj") == "model.proj"


def test_a_module_outside_of_experts_is_its_own_container():
    modules = {"proj": SimpleNamespace(), "experts.0.w1": SimpleNamespace()}
    chosen = select(modules, include=("proj",))  # type: ignore[arg-type]
    assert (chosen.converted, chosen.kept) == ({"proj"}, {"experts"})
