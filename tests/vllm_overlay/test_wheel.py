# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The wheel and the editable install: what they carry, that they work in an environment of their
own, that they leave vLLM alone.

The wheel is of one platform and Python: it carries the extension where there was a C compiler. Both
are built here in an environment whose flags would change values, which the build must not heed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from mxfp4_int4.rows import convert_rows
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


COMPILER = shutil.which("cc")
HOSTILE = {"CC": f"{COMPILER} -ffast-math", "CFLAGS": "-Ofast", "LDFLAGS": "-ffast-math"}
NO_COMPILER = {"CC": "no-such-compiler"}


def copied_sources(folder: Path) -> Path:
    """So that nothing is left in the checkout, and nothing is taken from an earlier build."""
    for name in SOURCES:
        source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__", "*.so")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


def build_wheel(folder: Path, environment: dict[str, str]) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    sources = copied_sources(folder / "src")
    run(*pip, "--wheel-dir", folder, sources, env=os.environ | environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), HOSTILE if COMPILER else NO_COMPILER)


def extensions(names: set[str]) -> list[str]:
    return [name for name in names if name.startswith("mxfp4_int4/_native.")]


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = list((ROOT / "vllm").rglob("*.py"))
    assert len(extensions(names)) == (1 if COMPILER else 0)
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
    assert sorted(runtime) == ["msgspec", "rich", "typer", "wrapt"]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def bare_environment(target: Path) -> tuple[Path, Path]:
    """An environment that shares what is installed here -> its Python, its own packages."""
    venv.create(target, with_pip=False)
    python = target / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # torch and the rest are shared with the environment that runs the tests.
    (site / "shared.pth").write_text(str(upstream_root().parent))
    return python, site


INSTALLED = """
import json, sys
from importlib.metadata import entry_points
from mxfp4_int4 import native_library, rows
library = native_library.library()
new, bits = rows.convert_rows(bytes(range(64)), bytes([120, 7, 0, 130]), 2)
smallest = float(5e-324)  # flush-to-zero, which -ffast-math switches on, would make it 0
names = ("vllm.platform_plugins", "vllm.general_plugins", "console_scripts")
print(json.dumps({
    "extension": library is not None,
    "torch": "torch" in sys.modules,
    "file": native_library.__file__,
    "converted": bytes(new).hex() + bytes(bits).hex(),
    "subnormals": smallest * 3 > 0 and sys.float_info.min / 2 > 0,
    "entries": sorted(f"{e.group} {e.name} {e.value}" for n in names for e in entry_points(group=n)
                      if "vllm_overlay" in e.value or "kimi" in e.value),
}))
"""


@pytest.mark.parametrize(
    "kind",
    [
        "wheel",
        pytest.param("editable", marks=pytest.mark.slow),
        pytest.param("no compiler", marks=pytest.mark.slow),
    ],
)
def test_every_way_to_install_gives_the_same(kind, request, tmp_path):
    """Commands, entry points, and the bits of a conversion, by the extension where there is one."""
    python, site = bare_environment(tmp_path / "env")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    if kind == "wheel":
        run(*pip, request.getfixturevalue("wheel"))
    elif kind == "no compiler":
        run(*pip, build_wheel(tmp_path, NO_COMPILER))
    else:
        sources = copied_sources(tmp_path / "src")
        flags = HOSTILE if COMPILER else NO_COMPILER
        run(*pip, "--no-build-isolation", "--editable", sources, env=os.environ | flags)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.pop("VLLM_KIMI_K3_NATIVE", None)
    found = json.loads(run(python, "-c", INSTALLED, cwd=tmp_path, env=environment))
    home = tmp_path / "src" if kind == "editable" else site
    assert Path(found["file"]) == home / "mxfp4_int4" / "native_library.py"
    compiled = COMPILER is not None and kind != "no compiler"
    assert found["extension"] == compiled
    assert found["torch"] == (not compiled)
    assert found["subnormals"]
    assert found["entries"] == [
        "console_scripts kimi-k3 kimi_k3.cli:main",
        "vllm.general_plugins kimi_k3 vllm_overlay:general_plugin",
        "vllm.platform_plugins kimi_k3 vllm_overlay:platform_plugin",
    ]
    new, bits = convert_rows(bytes(range(64)), bytes([120, 7, 0, 130]), 2)
    assert found["converted"] == bytes(new).hex() + bytes(bits).hex()
    help_text = run(python.with_name("kimi-k3"), "--help", cwd=tmp_path, env=environment)
    for command in ("convert", "doctor", "rehearse", "report", "status"):
        assert f" {command} " in help_text


def test_install_use_uninstall_leaves_vllm_as_it_was(wheel, tmp_path):
    """With the Python files of the vLLM that runs these tests."""
    python, site = bare_environment(tmp_path / "env")
    shutil.copytree(
        upstream_root(), site / "vllm", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
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
