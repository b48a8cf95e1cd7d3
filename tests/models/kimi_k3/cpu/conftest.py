# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Checkpoints that tests of the CPU model share, and the way to its support modules."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.spec import ModelSpec
from k3_checkpoint.write import write_checkpoint

# Helpers are also run as scripts and import one another; importlib mode adds nothing to the path.


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """Write a checkpoint like the tiny preset's, text-only unless told otherwise, once each."""
    made: dict[ModelSpec, Path] = {}

    def make(**changes) -> Path:
        spec = replace(PRESETS["tiny"], **({"vision": None} | changes))
        if spec not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            write_checkpoint(folder, spec, shards=3)
            made[spec] = folder
        return made[spec]

    return make


@pytest.fixture
def caplog_vllm(caplog):
    """Return what vLLM's loggers have said so far.

    They hand records on to the root logger or not, as they were configured; each counts once.
    """
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield lambda: [r.getMessage() for r in {id(r): r for r in caplog.records}.values()]
    logger.removeHandler(caplog.handler)
