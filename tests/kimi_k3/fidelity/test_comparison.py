# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""All figures of a small checkpoint: those of the conversion, added up, the same every time."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kimi_k3.fidelity.comparison import Choice, compare
from kimi_k3.fidelity.figures import Figures
from mxfp4_int4 import convert_experts


@pytest.fixture(scope="module")
def comparison(int4):
    return compare(int4, Choice(worst=7))


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_layers_and_projections_add_up(comparison):
    assert comparison.layers == [1, 2]
    assert comparison.projections == ["w1", "w2", "w3"]
    assert list(comparison.parts) == [(layer, w) for layer in (1, 2) for w in ("w1", "w2", "w3")]
    together = sum(map(comparison.of_layer, comparison.layers), Figures())
    assert together.groups == comparison.total.groups == 2 * 3 * 16 * 64 * 128 // 32
    assert together.codes == comparison.total.codes
    assert len(comparison.worst) == 7
    assert comparison.worst[0].error == max(group.error for group in comparison.worst)


def test_figures_are_those_of_the_whole_model(comparison, mxfp4):
    tensors = tensors_of(mxfp4)
    names = [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]
    of_layer = {}
    for layer in (1, 2):
        stats = [
            convert_experts(
                tensors[f"{name}_packed"][None],
                tensors[f"{name}_scale"][None],
                layout="plain",
                collect_stats=True,
            ).stats
            for name in names
            if f"layers.{layer}." in name
        ]
        of_layer[layer] = stats[0].merge(*stats[1:])
        ours = comparison.of_layer(layer)
        assert ours.exact == of_layer[layer].exact_groups
        expected = of_layer[layer].relative_squared_error
        assert ours.relative_squared_error == pytest.approx(expected, rel=1e-6)


def test_a_second_comparison_is_the_same(comparison, int4):
    assert compare(int4, Choice(worst=7)).as_dict() == comparison.as_dict()


def test_a_sample_comes_close(comparison, int4):
    sample = compare(int4, Choice(share=0.25))
    assert sample.total.groups == comparison.total.groups // 4
    error = comparison.total.relative_squared_error
    assert sample.total.relative_squared_error == pytest.approx(error, rel=0.05)


def test_progress_is_told(int4):
    told, done = [], []
    compare(int4, Choice(share=0.1), told.append, lambda: done.append(1))
    assert told == [2 * 16 * 3]
    assert len(done) == told[0]


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.5}, {"share": float("nan")}, {"worst": -1}]
)
def test_wrong_choices_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        Choice(**wrong)


def test_everything_is_plain_json(comparison):
    found = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert found["scale_rule"] == "mse"
    assert [(part["layer"], part["projection"]) for part in found["layers"]] == list(
        map(tuple, comparison.parts)
    )
