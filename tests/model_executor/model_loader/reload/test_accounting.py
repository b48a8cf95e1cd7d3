# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The account of a load, on a model that has nothing to do with Kimi-K3."""

import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm.model_executor.model_loader.reload import (
    accounting,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
    record_metadata_for_reloading,
    sources,
)
from vllm.model_executor.model_loader.reload.budget import BUDGET_VARIABLE
from vllm.model_executor.model_loader.reload.summary import GIB, RECORD_VARIABLE, Missing
from vllm.model_executor.models.utils import AutoWeightsLoader

LAYERS, ROWS, COLUMNS = 3, 6, 4
WEIGHT, BIAS = ROWS * COLUMNS * 4, ROWS * 4


def test_held_bytes_at_every_step(load):
    """Interleaved layers: each source counts from its arrival to its layer's completion."""
    account = load.account
    steps = [
        ("layers.0.weight", (ROWS, COLUMNS), WEIGHT),
        ("layers.1.bias", (ROWS,), WEIGHT + BIAS),
        ("layers.2.weight", (ROWS, COLUMNS), 2 * WEIGHT + BIAS),
        ("layers.0.bias", (ROWS,), WEIGHT + BIAS),
        ("layers.1.weight", (ROWS, COLUMNS), WEIGHT),
        ("layers.2.bias", (ROWS,), 0),
    ]
    for name, shape, held in steps:
        load.give(name, torch.ones(shape))
        assert (account.held.host, account.held.device) == (held, 0), name
    load.finish()
    summary = accounting.last()
    assert (summary.wrapped, summary.completed_early, summary.delays) == (LAYERS, LAYERS, ())
    assert summary.sources == len(steps)
    # The fifth source completes its layer: while it is loaded, all of layer 1 and 2 are held.
    assert summary.peak_host.nbytes == 2 * WEIGHT + 2 * BIAS
    assert summary.peak_host.owner == "layers.0.bias"
    assert summary.peak.nbytes == summary.peak_between_calls == 0


def test_values_are_those_of_the_checkpoint(load):
    expected = {name: torch.randn(p.shape) for name, p in load.model.named_parameters()}
    load.model.load_weights(iter(expected.items()))
    load.finish()
    assert all(torch.equal(p, expected[name]) for name, p in load.model.named_parameters())


def test_sources_are_released_on_completion(load):
    references = []
    for name in ("weight", "bias"):
        source = torch.ones(load.model.layers[0].get_parameter(name).shape)
        references.append(weakref.ref(source))
        load.give(f"layers.0.{name}", source)
        del source
        assert all((reference() is None) is (name == "bias") for reference in references)


def test_a_storage_counts_once(load):
    """Two sources that are views of one tensor hold that tensor, once, whole."""
    whole = torch.ones(2 * ROWS, COLUMNS)
    load.give("layers.0.weight", whole[:ROWS])
    load.give("layers.1.weight", whole[ROWS:])
    assert load.account.held.host == 2 * WEIGHT
    load.give("layers.0.bias", torch.ones(ROWS))
    assert load.account.held.host == 2 * WEIGHT
    load.give("layers.1.bias", torch.ones(ROWS))
    assert load.account.held.host == 0


def test_delayed_layers_are_named_before_finalization(load, log):
    load.give("layers.1.weight", torch.ones(ROWS, COLUMNS))
    (delay,) = load.account.delays()
    assert delay.layer == "layers.1"
    assert delay.nbytes == WEIGHT
    assert delay.missing == (Missing("bias", 0, ROWS, 1),)
    load.finish()
    assert accounting.last().delays == (delay,)
    warning = next(line for line in log if line.startswith("WARNING"))
    assert "layers.1: bias: 0 of 6 elements arrived; 6 elements in no shard" in warning


def test_rows_are_counted_where_whole_rows_arrived():
    assert str(Missing("weight", 4 * COLUMNS, 6 * COLUMNS, COLUMNS)) == "weight: 4 of 6 rows"
    assert str(Missing("weight", 3, 24, 1)) == "weight: 3 of 24 elements"


def test_one_line_and_one_record(load, log, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KIMI_K3_LOAD_ACCOUNT", str(tmp_path))
    account = accounting.begin()
    account.name_layers(load.model)
    for layer in range(LAYERS):
        load.give(f"layers.{layer}.weight", torch.ones(ROWS, COLUMNS))
        load.give(f"layers.{layer}.bias", torch.ones(ROWS))
    load.finish()
    (line,) = [line for line in log if "Load account" in line]
    assert "rank 0: 3 layers wrapped, 3 completed early, 0 delayed; peak held" in line
    record = json.loads(next(tmp_path.glob("load-rank0-*.json")).read_text())
    assert record["wrapped"] == record["completed_early"] == LAYERS
    assert [point["event"] for point in record["history"]] == [
        "source",
        "source",
        "complete",
    ] * LAYERS
    assert record["history"][0]["host"] == WEIGHT
    assert record["history"][-1]["host"] == 0
    assert record["peak_host"]["nbytes"] == WEIGHT + BIAS
    assert f"{(WEIGHT + BIAS) / GIB:.4f} GiB on the host" in line


def test_meta_stands_for_a_device(load):
    load.give("layers.0.weight", torch.empty(ROWS, COLUMNS, device="meta"))
    assert (load.account.held.device, load.account.held.host) == (WEIGHT, 0)


def test_a_source_after_completion_is_not_counted(load):
    param = load.model.layers[0].weight
    loader = param.weight_loader
    for name, shape in (("weight", (ROWS, COLUMNS)), ("bias", (ROWS,))):
        load.give(f"layers.0.{name}", torch.ones(shape))
    loader(param, torch.zeros(ROWS, COLUMNS))
    assert not load.account.held
    assert load.account.summary().sources == 2
    assert torch.equal(load.model.layers[0].weight, torch.ones(ROWS, COLUMNS))


def test_a_second_load_starts_over(load):
    load.give("layers.0.weight", torch.ones(ROWS, COLUMNS))
    load.finish()
    assert not accounting.current().held
    assert accounting.current().summary().sources == 0


def test_two_writers_do_not_collide(load, tmp_path):
    load.finish()
    summary = accounting.last()
    assert len({summary.write(tmp_path) for _ in range(20)}) == 20


def test_another_model_is_left_alone(monkeypatch, log):
    """Nothing is wrapped and nothing recorded, unless asked for."""
    for variable in (BUDGET_VARIABLE, RECORD_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    model, before = nn.Sequential(nn.Linear(COLUMNS, ROWS)), accounting.last()
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    param = model[0].weight
    assert param.weight_loader.__globals__ is vars(layerwise)
    assert not hasattr(param.weight_loader.__wrapped__, "__wrapped__")
    weights = iter([("0.weight", torch.ones(ROWS, COLUMNS)), ("0.bias", torch.ones(ROWS))])
    AutoWeightsLoader(model).load_weights(weights)
    assert sources.under_way is None
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
    assert torch.equal(model[0].weight, torch.ones(ROWS, COLUMNS))
    assert accounting.last() is before
    assert not [line for line in log if "account" in line]


@pytest.mark.parametrize(
    ("architecture", "variable", "kept"),
    [
        ("LlamaForCausalLM", None, False),
        ("LlamaForCausalLM", BUDGET_VARIABLE, True),
        ("KimiK3ForConditionalGeneration", None, True),
        ("KimiLinearForCausalLM", None, True),
    ],
)
def test_whose_load_is_accounted_for(monkeypatch, architecture, variable, kept):
    for name in (BUDGET_VARIABLE, RECORD_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    config = SimpleNamespace(architectures=[architecture])
    found = []
    accounting.create_model(
        lambda *args, **kwargs: found.append(sources.under_way) or nn.Linear(1, 1), None, config
    )
    assert (found[0] is not None) is kept


def test_wrappers_pass_on_what_they_do_not_know(load):
    """0.34.0's EPLB calls `initialize_layerwise_reload(model, defer_processing=True)`."""
    seen = []

    def record(*args, **kwargs):
        seen.append((args[1:], kwargs))
        return args[0].weight_loader if len(seen) == 1 else "result"

    layer = load.model.layers[0]
    layer.weight_loader = lambda *args, **kwargs: None
    accounting.begin()
    accounting.counting_loader(record, layer, "weight", 1, more=2)
    for function in (accounting.process_layer, accounting.reload, accounting.finalize):
        assert function(record, layer, 1, more=2) == "result"
    assert seen == [(("weight", 1), {"more": 2}), *[((1,), {"more": 2})] * 3]
