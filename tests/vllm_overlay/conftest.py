# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A small stand-in for an installed vLLM with an overlay tree of its own, run in a fresh process.

The overlay knows nothing of Kimi, so its machinery is tested on packages of a few lines.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import vllm_overlay

PACKAGE = Path(vllm_overlay.__file__).parent


class Sandbox:
    """A folder with a stand-in ``vllm`` package and a copy of the overlay package.

    Attributes:
        site: What stands first on the path of the processes that `run` starts.
    """

    def __init__(self, root: Path) -> None:
        self.site = root / "site"
        shutil.copytree(
            PACKAGE, self.site / "vllm_overlay", ignore=shutil.ignore_patterns("__pycache__")
        )
        self.upstream(
            {
                "__init__.py": "",
                "_version.py": "__version__ = version = '0.32.0'",
                "plugins.py": "value = 'upstream'",
            }
        )

    def _write(self, folder: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def upstream(self, files: dict[str, str]) -> None:
        """Write files of the stand-in vLLM, by path inside the package."""
        self._write(self.site / "vllm", files)

    def overlay(self, files: dict[str, str]) -> None:
        """Write files of the overlay tree, by path inside the package."""
        self._write(self.site / "vllm_overlay" / "tree" / "vllm", files)

    def run(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `code` in a fresh Python; the stand-in is the only vLLM that it can see."""
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=self.site,
            env={**os.environ, "PYTHONPATH": str(self.site), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def output(self, code: str, **environment: str) -> str:
        """Run `code`, expect success, and return what it printed."""
        process = self.run(code, **environment)
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)
