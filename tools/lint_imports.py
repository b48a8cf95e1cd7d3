# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Checks the import contracts of pyproject.toml: directions between the packages, and no circles.

    python tools/lint_imports.py [ROOT]

import-linter finds a package the way an import would, and would find the installed vLLM, because
``vllm/`` here is a folder without ``__init__.py``. So the packages are copied into a temporary
folder where every folder is a package. Nothing of them is run.
"""

import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]


def lay_out(packages: list[Path], target: Path) -> None:
    """Copy `packages` into `target` and make every folder of them a regular package."""
    for package in packages:
        copy = target / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for folder in (copy, *copy.rglob("*/")):
            (folder / "__init__.py").touch()


def main(root: Path) -> int:
    """Print import-linter's report on `root` and return its exit code, 0 when all is well."""
    config = root / "pyproject.toml"
    names = tomllib.loads(config.read_text())["tool"]["importlinter"]["root_packages"]
    with tempfile.TemporaryDirectory() as folder:
        lay_out([root / name for name in names], Path(folder))
        os.chdir(folder)  # import-linter looks for packages in the working directory first
        try:
            return lint_imports(config_filename=str(config), no_cache=True, no_logo=True)
        finally:
            os.chdir(root)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT))
