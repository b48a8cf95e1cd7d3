# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One small checkpoint and its conversion, made once for all tests; none of them changes either."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.write import write_checkpoint
from kimi_k3.convert import convert_checkpoint

SMALL = replace(PRESETS["tiny"], layers=3, experts=4, vision=None)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """24 modules in four shards, and files beside them."""
    folder = tmp_path_factory.mktemp("conversion") / "source"
    write_checkpoint(folder, SMALL, shards=4)
    (folder / "chat template.jinja").write_text("{{ message }}")
    (folder / "modeling" / "deep").mkdir(parents=True)
    (folder / "modeling" / "deep" / "modeling_kimi.py").write_text("raise SystemExit\n")
    (folder / "modeling" / "empty.bin").write_bytes(b"")
    return folder


@pytest.fixture(scope="session")
def result(source, tmp_path_factory) -> Path:
    """The conversion of `source`."""
    folder = tmp_path_factory.mktemp("conversion") / "result"
    convert_checkpoint(source, folder)
    return folder


@pytest.fixture
def finished(result, tmp_path) -> Path:
    """A finished conversion that a test may damage."""
    return shutil.copytree(result, tmp_path / "finished")
