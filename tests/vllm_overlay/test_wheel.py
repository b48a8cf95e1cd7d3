# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The wheel: what it carries, that it works where it is installed, that it leaves vLLM alone."""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from vllm_overlay.tree import upstream_root

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm_overlay", "mxfp4_int4", "k3_checkpoint", "vllm", "kimi_k3")
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.py", *PACKAGES)


def run(*command: object, **options) -> str:
    process = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, **options
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, folder / "src" / name, ignore=ignore)
        else:
            (folder / "src").mkdir(exist_ok=True)
            shutil.copy(source, folder / "src" / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, folder / "src")
    (built,) = folder.glob("*.whl")
    return built


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = list((ROOT / "vllm").rglob("*.py"))
    assert "mxfp4_int4/native.c" in names
    assert {f"vllm_overlay/tree/{file.relative_to(ROOT)}" for file in sources} <= names
    assert "vllm_overlay/activation.py" in names
    # Nothing that would be unpacked into the installed vLLM's own folder, or into tests.
    assert {name.split("/")[0] for name in names} == {
        *(package for package in PACKAGES if package != "vllm"),
        "vllm_kimi_k3-0.1.0.dist-info",
    }


def test_requirements_do_not_name_vllm(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read("vllm_kimi_k3-0.1.0.dist-info/METADATA").decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    runtime = [
        line.split()[1].split("<")[0].split(">")[0] for line in needed if "extra" not in line
    ]
    assert sorted(runtime) == ["rich", "typer", "wrapt"]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_install_use_uninstall_leaves_vllm_as_it_was(wheel, tmp_path):
    """In an environment of its own, with the Python files of the vLLM that runs these tests."""
    target = tmp_path / "env"
    venv.create(target, with_pip=False)
    python = target / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    shutil.copytree(
        upstream_root(), site / "vllm", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    # torch and the rest are shared with the environment that runs the tests.
    (site / "shared.pth").write_text(str(upstream_root().parent))
    before = digests(site / "vllm")
    assert len(before) > 1000
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", wheel)
    code = (
        "import vllm_overlay, vllm\n"
        "from vllm_overlay import tree\n"
        "vllm_overlay.activate()\n"
        "from vllm.models.kimi_k3.amd import kda\n"
        "print(vllm.__file__)\n"
        "print(tree.overlay_root())\n"
        "print(kda._KimiGDNMergedColumnParallelLinear.__name__)\n"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    output = run(python, "-c", code, cwd=tmp_path, env=environment).splitlines()[-3:]
    assert output == [
        str(site / "vllm" / "__init__.py"),
        str(site / "vllm_overlay" / "tree" / "vllm"),
        "_PaddedKimiGDNMergedColumnParallelLinear",
    ]
    assert digests(site / "vllm") == before
    run(*pip, "uninstall", "--quiet", "--yes", "vllm-kimi-k3")
    assert digests(site / "vllm") == before
    assert not (site / "vllm_overlay").exists()
