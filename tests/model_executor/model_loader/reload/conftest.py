# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A small model of plain torch layers under layerwise loading, and what vLLM logs meanwhile."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm.model_executor.model_loader.reload import (
    accounting,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.accounting import LoadAccount
from vllm.model_executor.model_loader.reload.budget import BUDGET_VARIABLE
from vllm.model_executor.models.utils import AutoWeightsLoader

LAYERS, ROWS, COLUMNS = 3, 6, 4
WEIGHT_BYTES = ROWS * COLUMNS * 4


class Model(nn.Module):
    """Three linear layers with a weight `[6, 4]` and a bias `[6]`, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS) for _ in range(LAYERS))

    def load_weights(self, weights) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)


class Load:
    """A reload of the model under way."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def account(self) -> LoadAccount:
        return accounting.current()

    def give(self, name: str, tensor: torch.Tensor) -> None:
        param = self.model.get_parameter(name)
        param.weight_loader(param, tensor)

    def finish(self) -> None:
        finalize_layerwise_reload(self.model, SimpleNamespace(dtype=torch.float32))


@pytest.fixture
def asked_for(monkeypatch) -> None:
    """The account of a model that is not Kimi-K3 is kept where the environment asks for it."""
    monkeypatch.setenv(BUDGET_VARIABLE, "0")


@pytest.fixture
def load(asked_for) -> Load:
    model = Model()
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    return Load(model)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What vLLM logs, infos included, as text."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    handler, logger = Keep(), logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
