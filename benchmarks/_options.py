# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kinds of options that benchmarks share; each refuses what would fail after minutes of work."""

import argparse
import os
from pathlib import Path


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return value


def amount(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def device(text: str) -> str:
    """cpu, or cuda (ROCm too) where torch has one."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, found {text!r}")
    if text == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise argparse.ArgumentTypeError(
                f"torch {torch.__version__} finds no GPU here: cuda needs one, and a torch built "
                "for CUDA or ROCm"
            )
    return text


def json_file(text: str) -> Path:
    """A file that can be written; its folder is made."""
    file = Path(text)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{file.parent}: {error.strerror}") from error
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{file}: cannot be written")
    return file
