# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A converted checkpoint against its source: every tensor, every file, and the library's view."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open

from vllm.entrypoints.kimi_k3.checkpoint.presets import PRESETS
from vllm.entrypoints.kimi_k3.checkpoint.write import write_checkpoint
from vllm.entrypoints.kimi_k3.conversion import Manifest, convert_checkpoint
from vllm.model_executor.layers.quantization.utils.mxfp4_int4 import (
    ConvertedExperts,
    convert_experts,
    dequantize,
)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder / "source", PRESETS["tiny"], shards=3)
    convert_checkpoint(folder / "source", folder / "result")
    return folder / "source", folder / "result"


def test_every_expert_is_converted_and_all_else_is_the_same(tiny):
    source, result = (all_tensors(folder) for folder in tiny)
    modules = {n.removesuffix(".weight_packed") for n in source if n.endswith(".weight_packed")}
    assert len(modules) == 4 * 16 * 3
    parts = {f"{m}.weight_{part}" for m in modules for part in ("packed", "scale", "shape")}
    assert parts < result.keys()
    assert result.keys() - parts == source.keys() - parts
    for name in result.keys() - parts:
        assert result[name].dtype == source[name].dtype
        assert torch.equal(result[name], source[name]), name
    for module in modules:
        expected = convert_experts(
            source[f"{module}.weight_packed"][None],
            source[f"{module}.weight_scale"][None],
            layout="pack_quantized",
        )
        assert torch.equal(result[f"{module}.weight_packed"], expected.weight[0])
        assert torch.equal(result[f"{module}.weight_scale"], expected.scale[0])


def test_the_library_decompresses_to_our_values(tiny):
    result = all_tensors(tiny[1])
    config = json.loads((tiny[1] / "config.json").read_text())["text_config"]
    scheme = QuantizationConfig.model_validate(config["quantization_config"])
    modules = [n.removesuffix(".weight_packed") for n in result if n.endswith(".weight_packed")]
    for module in modules:
        state = {
            leaf: result[f"{module}.{leaf}"]
            for leaf in ("weight_packed", "weight_scale", "weight_shape")
        }
        rows, columns = state["weight_shape"].tolist()
        library = PackedQuantizationCompressor.decompress(state, scheme.config_groups["group_0"])
        ours = dequantize(
            ConvertedExperts(state["weight_packed"][None], state["weight_scale"][None]),
            "pack_quantized",
            (1, rows, columns),
            torch.bfloat16,
        )
        assert library["weight"].dtype == torch.bfloat16
        assert torch.equal(library["weight"], ours[0])


def test_the_manifest_is_read_as_it_was_written(tiny):
    manifest = Manifest.read(tiny[1])
    assert manifest.source == str(tiny[0])
    assert manifest.shards.keys() == {file.name for file in tiny[0].glob("*.safetensors")}
    assert sum(len(shard.modules) for shard in manifest.shards.values()) == 4 * 16 * 3
