# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The budget for held sources: where it comes from, the warning at half, the stop with a table."""

import pytest
import torch

from vllm.model_executor.model_loader.reload import accounting, budget
from vllm.model_executor.model_loader.reload.accounting import LoadAccount
from vllm.model_executor.model_loader.reload.budget import (
    BUDGET_VARIABLE,
    DEFAULT_SHARE,
    Budget,
    LoadBudgetError,
    budget_for,
)
from vllm.model_executor.model_loader.reload.summary import GIB, Delay, table

ROWS, COLUMNS = 6, 4
WEIGHT = ROWS * COLUMNS * 4
CPU, META = torch.device("cpu"), torch.device("meta")


def weight() -> torch.Tensor:
    return torch.ones(ROWS, COLUMNS)


def begin(load, limit: int) -> None:
    account = accounting.begin(LoadAccount(Budget(limit, True, "a test")))
    account.name_layers(load.model)


def test_stops_with_the_table_of_holders(load):
    begin(load, 2 * WEIGHT)
    load.give("layers.2.weight", weight())
    load.give("layers.0.weight", weight())
    with pytest.raises(LoadBudgetError) as caught:
        load.give("layers.1.weight", weight())
    message = str(caught.value)
    for expected in (
        "3 layers that are not complete",
        "(a test)",
        "layers.0  bias: 0 of 6 elements",
        "layers.2  bias: 0 of 6 elements",
        "VLLM_KIMI_K3_LOAD_BUDGET_GIB",
    ):
        assert expected in message


def test_warns_once_at_half(load, log):
    begin(load, 4 * WEIGHT)
    load.give("layers.0.weight", weight())
    load.give("layers.1.weight", weight())
    assert log == []
    load.give("layers.2.bias", torch.ones(ROWS))
    load.give("layers.2.weight", weight())
    (warning,) = log
    assert "for 3 layers that are not complete; loading stops at" in warning
    assert "layers.1  bias: 0 of 6 elements" in warning


def test_a_long_table_ends_with_a_sum():
    lines = table([Delay(f"layer{i}", GIB, ()) for i in range(64)]).splitlines()
    assert len(lines) == 11
    assert lines[-1].split() == ["54.000", "GiB", "in", "54", "more", "layers"]


def test_the_default_is_a_share_of_free_memory_and_warns(monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda device: 100 * GIB)
    monkeypatch.delenv(BUDGET_VARIABLE, raising=False)
    limit = budget_for(CPU)
    assert limit.nbytes == DEFAULT_SHARE * 100 * GIB
    assert limit.on_host
    assert not limit.stops
    assert "100.0 GiB" in limit.origin
    assert budget_for(CPU, default=False) is None


def test_the_allocators_cache_is_free(monkeypatch):
    figures = {"memory_reserved": 100, "memory_allocated": 4, "get_memory_info": (4, 192)}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, figure=figure: figure)
    assert budget.free_memory(torch.device("cuda")) == 100


def test_a_default_never_stops(load, log):
    account = LoadAccount(Budget(WEIGHT, True, "a share", stops=False))
    accounting.begin(account).name_layers(load.model)
    for layer in (0, 1, 2):
        load.give(f"layers.{layer}.weight", weight())
    (warning,) = log
    assert "2 layers that are not complete; expected at most 0.00 GiB (a share)" in warning


def test_no_limit_where_memory_has_no_meaning(monkeypatch):
    monkeypatch.delenv(BUDGET_VARIABLE, raising=False)
    assert budget_for(META) is None


@pytest.mark.parametrize(("text", "nbytes"), [("0.5", GIB // 2), ("12", 12 * GIB), ("0", None)])
def test_the_environment_decides(monkeypatch, text, nbytes):
    monkeypatch.setenv(BUDGET_VARIABLE, text)
    limit = budget_for(CPU)
    assert (limit and limit.nbytes) == nbytes


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_budget_that_is_none_is_refused(load, monkeypatch, text):
    monkeypatch.setenv(BUDGET_VARIABLE, text)
    with pytest.raises(ValueError, match=f"expected a number of GiB.*found '{text}'"):
        load.give("layers.0.weight", weight())
