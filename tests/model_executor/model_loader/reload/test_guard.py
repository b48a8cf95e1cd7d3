# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The budget for held sources: where it comes from, the warning at half, the stop with a table."""

import pytest
import torch

from vllm.model_executor.model_loader.reload import accounting, guard
from vllm.model_executor.model_loader.reload.account import LoadAccount
from vllm.model_executor.model_loader.reload.guard import GIB, Budget, LoadBudgetError, budget_for

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
    holders = tuple(guard.Holder(f"layer{i}", GIB, "x") for i in range(64))
    lines = guard.Holdings(64 * GIB, 0, holders).table().splitlines()
    assert len(lines) == 11
    assert lines[-1].split() == ["54.000", "GiB", "in", "54", "more", "layers"]


def test_the_default_is_a_share_of_free_memory(monkeypatch):
    monkeypatch.setattr(guard, "free_memory", lambda device: 100 * GIB)
    monkeypatch.delenv(guard.BUDGET_VARIABLE, raising=False)
    budget = budget_for(CPU)
    assert budget.nbytes == guard.DEFAULT_SHARE * 100 * GIB
    assert budget.on_host
    assert "100.0 GiB" in budget.origin


def test_no_limit_where_memory_has_no_meaning(monkeypatch):
    monkeypatch.delenv(guard.BUDGET_VARIABLE, raising=False)
    assert budget_for(META) is None


@pytest.mark.parametrize(("text", "nbytes"), [("0.5", GIB // 2), ("12", 12 * GIB), ("0", None)])
def test_the_environment_decides(monkeypatch, text, nbytes):
    monkeypatch.setenv(guard.BUDGET_VARIABLE, text)
    budget = budget_for(CPU)
    assert (budget and budget.nbytes) == nbytes


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_budget_that_is_none_is_refused(load, monkeypatch, text):
    monkeypatch.setenv(guard.BUDGET_VARIABLE, text)
    with pytest.raises(ValueError, match=f"expected a number of GiB.*found '{text}'"):
        load.give("layers.0.weight", weight())
