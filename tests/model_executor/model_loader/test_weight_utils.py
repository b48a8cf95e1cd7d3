# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`--load-format fastsafetensors` on the CPU platform."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from vllm.model_executor.model_loader.weight_utils import fastsafetensors_weights_iterator


def test_every_tensor_in_natural_order(tmp_path):
    pytest.importorskip("fastsafetensors")
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for i in (1, 2, 10):
        shard = {
            f"{i}.codes": torch.randint(0, 256, (5, 3), dtype=torch.uint8, generator=generator),
            f"{i}.weight": torch.randn(7, 4, generator=generator).bfloat16(),
            f"{i}.bias": torch.randn(9, generator=generator),
        }
        save_file(shard, tmp_path / f"model-{i}.safetensors")
        expected |= shard
    files = [str(tmp_path / f"model-{i}.safetensors") for i in (10, 2, 1)]
    # Also with an option that upstream may add.
    weights = fastsafetensors_weights_iterator(files, False, queue_size=0)
    found = {n: t.clone() for n, t in weights}
    assert [n.split(".")[0] for n in found] == ["1"] * 3 + ["2"] * 3 + ["10"] * 3
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], tensor)


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fastsafetensors", None)
    with pytest.raises(ImportError, match="use --load-format safetensors"):
        list(fastsafetensors_weights_iterator([str(tmp_path / "x.safetensors")], False))
