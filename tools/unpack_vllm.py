# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Fetches a released vLLM wheel and unpacks its Python files alone, for compatibility tests.

    python tools/unpack_vllm.py 0.33.0 .cache/vllm-0.33.0

With the folder first on PYTHONPATH and VLLM_TARGET_DEVICE=cpu, an environment that holds vLLM's CPU
build runs this version's Python code instead. Its kernels are not unpacked and not needed to build
layers and load weights.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# vLLM's wheels carry no Python version of their own; this names the platform they are built for.
PLATFORM = ["--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:", "--no-deps"]


def unpack(version: str, target: Path) -> None:
    """Put the Python files and metadata of vLLM `version` into `target`, whole or not at all.

    Raises:
        SystemExit: The wheel cannot be fetched.
    """
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", *PLATFORM]
        process = subprocess.run([*command, "--dest", folder, f"vllm=={version}"])
        if process.returncode:
            raise SystemExit(
                f"error: vLLM {version} could not be fetched; is a registry reachable?"
            )
        (wheel,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            members = [
                name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name
            ]
            archive.extractall(unpacked, members)
        shutil.move(unpacked, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    unpack(arguments.version, arguments.target)
