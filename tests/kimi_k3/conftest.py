# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Small checkpoints for the commands' tests, made once; and copies of them to damage."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

KIMI_K3 = Path(sys.executable).with_name("kimi-k3")
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def kimi_k3() -> Command:
    """Run the console script as a user does."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(KIMI_K3), *map(str, arguments)],
            env={**os.environ, "COLUMNS": "160", **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def mxfp4(tmp_path_factory) -> Path:
    """A text-only Kimi-K3 of three layers with MXFP4 experts."""
    from k3_checkpoint.presets import PRESETS
    from k3_checkpoint.write import write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints") / "mxfp4"
    write_checkpoint(folder, replace(PRESETS["tiny"], layers=3, vision=None), shards=2)
    return folder


@pytest.fixture(scope="session")
def int4(mxfp4) -> Path:
    """The same, converted."""
    from kimi_k3.convert import ConvertOptions, convert_checkpoint

    folder = mxfp4.parent / "int4"
    convert_checkpoint(mxfp4, folder, ConvertOptions(workers=1))
    return folder


@pytest.fixture
def mxfp4_copy(mxfp4, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(mxfp4, tmp_path / "mxfp4"))


@pytest.fixture
def int4_copy(int4, tmp_path) -> Path:
    """A copy to damage; its manifest still names the source."""
    return Path(shutil.copytree(int4, tmp_path / "int4"))
