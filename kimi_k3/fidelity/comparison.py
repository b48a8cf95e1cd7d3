# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`compare`: every matrix of a converted checkpoint, one after the other, in little memory."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_k3.convert.manifest import Manifest
from kimi_k3.fidelity.figures import Figures, Group, worst
from kimi_k3.fidelity.files import (
    Matrix,
    ReportError,
    find_matrices,
    read_checkpoint,
    read_manifest,
    with_source,
)

Key = tuple[int, str]


@dataclass(frozen=True)
class Comparison:
    """What measuring a converted checkpoint has found; all three prints show this one object.

    Attributes:
        destination: The converted checkpoint.
        source: What it was compared with; None if with nothing.
        without: Why there was nothing to compare with.
        manifest: What the conversion left behind.
        share: Of each matrix's rows that were looked at.
        parts: (layer, projection) -> its figures, in the order of layers.
        worst: The groups with the largest errors, the worst first.
    """

    destination: Path
    source: Path | None
    without: str
    manifest: Manifest | None
    share: float
    parts: Mapping[Key, Figures] = field(default_factory=dict)
    worst: tuple[Group, ...] = ()

    @cached_property
    def total(self) -> Figures:
        """Everything together."""
        return sum(self.parts.values(), Figures())

    @property
    def scale_rule(self) -> str:
        """Name of the rule that scales were chosen by."""
        return self.manifest.scale_rule if self.manifest is not None else "unknown"

    @property
    def tools(self) -> Mapping[str, str]:
        """Name -> version of what converted it; empty if unknown."""
        return self.manifest.tools if self.manifest is not None else {}

    @cached_property
    def layers(self) -> list[int]:
        """All layers; -1 stands for matrices outside of layers."""
        return sorted({layer for layer, _ in self.parts})

    @cached_property
    def projections(self) -> list[str]:
        """All projections."""
        return sorted({projection for _, projection in self.parts})

    def of_layer(self, layer: int) -> Figures:
        """Return the figures of a layer's projections together."""
        return sum((figures for (at, _), figures in self.parts.items() if at == layer), Figures())

    def error(self, layer: int, projection: str) -> float | None:
        """Return a projection's relative squared error; None where nothing was compared."""
        return self.parts.get((layer, projection), Figures()).relative_squared_error

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "destination": str(self.destination),
            "source": None if self.source is None else str(self.source),
            "not_compared_because": self.without or None,
            "scale_rule": self.scale_rule,
            "tools": dict(self.tools),
            "share_of_rows": self.share,
            "total": self.total.as_dict(),
            "layers": [
                {"layer": layer if layer >= 0 else None, "projection": name, **figures.as_dict()}
                for (layer, name), figures in self.parts.items()
            ],
            "worst_groups": [group.as_dict() for group in self.worst],
        }


@dataclass(frozen=True)
class Choice:
    """What to look at.

    Attributes:
        source: Instead of the one that the manifest names.
        layers: Only these; None for all.
        share: Of each matrix's rows, evenly spread; 1 for all.
        worst: How many of the worst groups to name.

    Raises:
        ValueError: A number outside its range.
    """

    source: Path | None = None
    layers: Collection[int] | None = None
    share: float = 1.0
    worst: int = 10

    def __post_init__(self) -> None:
        if not (math.isfinite(self.share) and 0 < self.share <= 1):
            raise ValueError(
                f"share of rows: expected more than 0 and at most 1, found {self.share}"
            )
        if self.worst < 0:
            raise ValueError(f"worst groups: expected 0 or more, found {self.worst}")


def prepare(destination: Path, choice: Choice) -> tuple[Comparison, list[Matrix]]:
    """Decide what is to be compared with what; reads headers, and no tensor.

    Returns:
        The comparison, still without figures, and the matrices to measure.

    Raises:
        ReportError: The checkpoint or its source is damaged, or they do not belong together.
    """
    result = read_checkpoint(destination)
    manifest = read_manifest(destination)
    matrices = find_matrices(result, manifest)
    if choice.layers is not None:
        there = {matrix.layer for matrix in matrices}
        absent = sorted(set(choice.layers) - there)
        if absent:
            named = ", ".join(map(str, absent[:10]))
            problem = f"layers {named}: no int4 matrix there, only in {min(there)} to {max(there)}"
            raise ReportError(destination, [problem])
        matrices = [matrix for matrix in matrices if matrix.layer in choice.layers]
    folder, without = _source(choice, manifest)
    if folder is not None:
        matrices = with_source(matrices, read_checkpoint(folder), manifest)
    return Comparison(destination, folder, without, manifest, choice.share), matrices


def _source(choice: Choice, manifest: Manifest | None) -> tuple[Path | None, str]:
    """Return the source to compare with, or None and why there is none."""
    if choice.source is not None:
        return choice.source, ""
    if manifest is None:
        return None, "the checkpoint does not say what it was made of; name it with --source"
    folder = Path(manifest.source)
    if not folder.is_dir():
        return None, f"its source, {folder}, is not there any more; name a copy with --source"
    return folder, ""


def compare(
    destination: Path,
    choice: Choice | None = None,
    on_matrices: Callable[[int], None] = lambda count: None,
    on_matrix: Callable[[], None] = lambda: None,
) -> Comparison:
    """Compare a converted checkpoint with its source, matrix by matrix.

    Args:
        destination: The converted checkpoint.
        choice: What to look at.
        on_matrices: Called with the number of matrices before the first one is read.
        on_matrix: Called after each.

    Raises:
        ReportError: The checkpoint or its source is damaged, or they do not belong together.
        OSError: A file cannot be read.
    """
    choice = choice or Choice()
    comparison, matrices = prepare(destination, choice)
    # Only now: torch takes seconds to import, and refusals need none.
    from kimi_k3.fidelity.measure import measure_all

    on_matrices(len(matrices))
    parts: dict[Key, Figures] = {}
    groups: list[Group] = []
    measured = measure_all(matrices, choice.share, choice.worst)
    for matrix, (figures, found) in zip(matrices, measured, strict=True):
        key = matrix.layer, matrix.projection
        parts[key] = parts.get(key, Figures()) + figures
        groups = worst([*groups, *found], choice.worst)
        on_matrix()
    return replace(comparison, parts=parts, worst=tuple(groups))
