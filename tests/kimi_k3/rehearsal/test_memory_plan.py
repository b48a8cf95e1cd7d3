# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The plan from config.json equals the real model's parameters, to the byte."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.spec import ModelSpec
from k3_checkpoint.write import write_checkpoint
from kimi_k3.convert.quantization import converted_config
from kimi_k3.rehearsal.components import EXPERTS, ORDER, SCALES
from kimi_k3.rehearsal.config import check_config
from kimi_k3.rehearsal.memory_plan import plan
from kimi_k3.rehearsal.ranks import FP8, Layout
from kimi_k3.rehearsal.rehearse import rehearse, resident

LAYOUTS = [
    (tp, rank, expert_parallel)
    for tp in (1, 2, 4, 8, 16, 32)
    for rank, expert_parallel in ((0, False), (tp - 1, True))
]
# Kimi-K3's own sizes, but few layers: dense, KDA with experts, MLA with experts.
FEW = ModelSpec(layers=5, vision=None)


def folder(path: Path, spec: ModelSpec) -> Path:
    """A folder with nothing but config.json, which is all that a model is built from."""
    (path / "config.json").write_text(json.dumps(spec.config()))
    return path


@pytest.mark.parametrize(("tp", "rank", "expert_parallel"), LAYOUTS)
def test_equals_the_real_model(tmp_path, tp, rank, expert_parallel):
    built = resident(folder(tmp_path, FEW), Layout(tp, rank, expert_parallel))
    assert plan(FEW.config(), Layout(tp, rank, expert_parallel)) == built


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "rank", "expert_parallel"), LAYOUTS)
def test_equals_the_real_model_at_full_depth(tmp_path, tp, rank, expert_parallel):
    spec = ModelSpec(vision=None)
    built = resident(folder(tmp_path, spec), Layout(tp, rank, expert_parallel))
    assert plan(spec.config(), Layout(tp, rank, expert_parallel)) == built


@pytest.mark.parametrize(
    "change",
    [
        {"experts": 10, "experts_per_token": 2},
        {"expert_intermediate_size": 320},
        {"latent_size": 96},
        {"vocab_size": 1000},
        {"head_dim": 64},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_equals_models_of_other_sizes(tmp_path, change, expert_parallel):
    """Sizes that do not divide: experts over ranks, slices and hidden sizes up to alignment."""
    small = replace(
        FEW, hidden_size=256, heads=8, experts=12, experts_per_token=2, dense_intermediate_size=512
    )
    spec = replace(small, **change)
    built = resident(folder(tmp_path, spec), Layout(4, 1, expert_parallel))
    assert plan(spec.config(), Layout(4, 1, expert_parallel)) == built


@pytest.mark.parametrize(("tp", "expert_parallel"), [(8, False), (8, True), (32, False)])
def test_equals_a_rehearsed_fp8_load(tmp_path, tp, expert_parallel):
    """Linear layers are quantized by the load itself, so only a load shows their bytes."""
    spec = replace(FEW, experts=32)
    write_checkpoint(tmp_path / "checkpoint", spec, shards=2, headers_only=True)
    loaded = rehearse(tmp_path / "checkpoint", Layout(tp, 0, expert_parallel, FP8))
    assert loaded.account.delays == ()
    assert plan(spec.config(), Layout(tp, 0, expert_parallel, FP8)) == loaded.plan


def test_the_vision_tower_is_that_of_the_checkpoint(tmp_path):
    spec = replace(FEW, experts=16, vision=ModelSpec().vision)
    write_checkpoint(tmp_path / "checkpoint", spec, shards=2, headers_only=True)
    loaded = rehearse(tmp_path / "checkpoint", Layout(8))
    assert loaded.plan.vision > 0
    assert plan(spec.config(), Layout(8)) == loaded.plan


def test_components_are_in_order_and_add_up():
    found = plan(ModelSpec().config(), Layout(8))
    assert tuple(found.components) == ORDER
    assert found.resident == sum(found.components.values())
    assert found.components[EXPERTS] == 92 * 896 * (768 * 1792 + 3584 * 192)


def test_a_converted_checkpoint_is_planned_as_the_conversion_while_loading():
    """The same bytes in the end, and none in between."""
    config = ModelSpec().config()
    online = plan(config, Layout(8))
    modules = frozenset(f"model.layers.{n}.block_sparse_moe.experts" for n in range(1, 93))
    stored = plan(converted_config(config, modules, frozenset()), Layout(8))
    assert stored.components[EXPERTS] == online.components[EXPERTS]
    assert stored.components[SCALES] == 2 * online.components[SCALES]
    assert stored.resident == online.resident + online.int4_scales
    assert (stored.int4_scales, stored.int4_transient) == (0, 0)


def _paths(value: object, at: tuple = ()) -> Iterator[tuple]:
    yield at
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, (*at, key))


PATHS = [path for path in _paths(PRESETS["tiny"].config()) if path]


@pytest.mark.parametrize("value", [None, True, -1, 0, 1.5, "x", [], {}, 2**40], ids=repr)
def test_any_value_in_place_of_another_is_planned_or_refused(value):
    """Nobody's config.json may end in a traceback: each field in turn gets a value of each kind."""
    for path in PATHS:
        config = PRESETS["tiny"].config()
        at = config
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with contextlib.suppress(ValueError, KeyError):
            check_config(config)
            plan(config, Layout(2))
        del at[path[-1]]
        with contextlib.suppress(ValueError, KeyError):
            check_config(config)
            plan(config, Layout(2))


def test_refusals_are_listed_at_once():
    config = ModelSpec().config()
    del config["text_config"]["quantization_config"]
    with pytest.raises(ValueError, match="cannot plan this") as caught:
        plan(config, Layout(7, 9))
    message = str(caught.value)
    for part in (
        "rank 9 lies outside a layout of 7",
        "expected experts in mxfp4-pack-quantized, found None",
        "attention heads: 96 is not divisible by 7 ranks",
        "vocabulary rows: 163840 is not divisible by 7 ranks",
    ):
        assert part in message


def test_imports_neither_torch_nor_the_engine(tmp_path):
    code = (
        "import sys; from kimi_k3.cli import main\n"
        f"sys.argv = ['kimi-k3', 'plan', {str(folder(tmp_path, ModelSpec()))!r}, '--json']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded', sorted({'torch', 'vllm.envs'} & sys.modules.keys()))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *output, loaded = process.stdout.splitlines()
    assert loaded == "loaded []", process.stderr
    assert json.loads("\n".join(output))["resident"] > 0
