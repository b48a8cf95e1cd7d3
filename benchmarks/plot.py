# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Draws what the other benchmarks measured.

    python benchmarks/plot.py build/bench docs/figures     # JSON files in, one SVG for each

Draws every file that it knows by its "benchmark"; a bar is a median, its whisker the quartiles.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    raise SystemExit("needs matplotlib: pip install '.[plot]'; `make bench` installs it") from None

matplotlib.use("svg")
# The same figures give the same file.
matplotlib.rcParams |= {"svg.hashsalt": "kimi-k3", "font.size": 9}
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

BLUE, GREY = "#2a6fbb", "#9aa3ad"


Row = tuple[str, float, float, float, bool]


def timed(name: str, found: dict[str, float], ours: bool, unit: float = 1.0) -> Row:
    """A row of `bars` in parts of a second."""
    return name, unit * found["median"], unit * found["low"], unit * found["high"], ours


def bars(axes: Axes, title: str, unit: str, rows: list[Row]) -> None:
    """Horizontal bars of (name, median, low, high, whether it is ours), the first on top."""
    places = range(len(rows))
    middle = [row[1] for row in rows]
    # Of one round all three are equal, but for rounding.
    errors = [[max(0.0, s * (row[1] - row[k])) for row in rows] for s, k in ((1, 2), (-1, 3))]
    colors = [BLUE if row[4] else GREY for row in rows]
    axes.barh(places, middle, xerr=errors, color=colors, height=0.7, ecolor="#333333", capsize=2)
    axes.set_yticks(places, [row[0] for row in rows])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left")
    most = max(row[3] for row in rows)
    for place, row in zip(places, rows, strict=True):
        text = f"{row[1]:,.0f}" if row[1] >= 100 else f"{row[1]:.3g}"
        axes.text(row[3] + most * 0.015, place, text, va="center")
    axes.set_xlim(0, most * 1.12)


def convert(found: dict[str, Any], figure: Figure) -> None:
    """Bytes over time of every variant, one panel for each tensor."""
    results = found["results"]
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axes, (name, one) in zip(panels, results.items(), strict=True):
        rows = []
        for variant, row in one["variants"].items():
            low, high = row["quartiles"]
            rates = [one["packed_bytes"] / s / 1e9 for s in (row["seconds"], high, low)]
            rows.append((variant, *rates, variant not in ("copy", "recipe")))
        bars(axes, f"{name} {', '.join(map(str, one['shape']))}", "GB/s of packed MXFP4", rows)


def convert_layers(found: dict[str, Any], figure: Figure) -> None:
    """Milliseconds a layer of many in a row."""
    rows = [timed(name, one, name != "copy", 1e3) for name, one in found["results"].items()]
    bars(figure.subplots(), "Layers one after another", "milliseconds a layer", rows)


def load(found: dict[str, Any], figure: Figure) -> None:
    """CPU seconds of streaming the same tensors."""
    results = found["results"]
    rows = [timed(name, one, name == "overlay") for name, one in results["variants"].items()]
    title = f"{results['tensors']:,} tensors through vLLM's loaders"
    bars(figure.subplots(), title, "CPU seconds", rows)


def kda_cpu(found: dict[str, Any], figure: Figure) -> None:
    """Milliseconds of a KDA prefill, both forms."""
    rows = [
        timed(f"{form}, {tokens} tokens", one[form], form == "chunked", 1e3)
        for tokens, one in found["results"].items()
        for form in ("recurrence", "chunked")
    ]
    bars(figure.subplots(), "KDA prefill on a CPU", "milliseconds", rows)


def serve_cpu(found: dict[str, Any], figure: Figure) -> None:
    """Seconds of a prefill and of a decode, both kinds of experts."""
    results = found["results"]
    for axes, what in zip(figure.subplots(1, 2), ("prefill", "decode"), strict=True):
        rows = [timed(kind, results[kind][what], kind == "int4") for kind in ("mxfp4", "int4")]
        bars(axes, what, "seconds", rows)


KINDS: dict[str, tuple[Callable[[dict[str, Any], Figure], None], Callable[[Any], float]]] = {
    "convert": (convert, lambda results: 0.4 + 2.2 * len(results)),
    "convert_layers": (convert_layers, lambda results: 1.7),
    "load": (load, lambda results: 1.9),
    "kda_cpu": (kda_cpu, lambda results: 0.9 + 0.5 * len(results)),
    "serve_cpu": (serve_cpu, lambda results: 1.6),
}


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="folder of JSON files")
    parser.add_argument("figures", type=Path, help="folder to draw into")
    options = parser.parse_args()
    files = sorted(options.results.glob("*.json"))
    if not files:
        raise SystemExit(f"{options.results}: expected the JSON files of benchmarks, found none")
    options.figures.mkdir(parents=True, exist_ok=True)
    for file in files:
        found = json.loads(file.read_text())
        if found.get("benchmark") not in KINDS:
            continue
        draw, height = KINDS[found["benchmark"]]
        figure = Figure(figsize=(7.5, height(found["results"])), layout="constrained")
        draw(found, figure)
        target = options.figures / f"{file.stem}.svg"
        figure.savefig(target, metadata={"Date": None})
        print(target)


if __name__ == "__main__":
    main()
