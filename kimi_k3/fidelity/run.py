# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`make_report`: every matrix of a converted checkpoint, one after the other, in little memory."""

import math
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3_checkpoint import Checkpoint
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


@dataclass
class Report:
    """What a conversion did.

    Attributes:
        destination: The checkpoint.
        source: What it was compared with; None if with nothing.
        without: Why there was nothing to compare with.
        manifest: What the conversion left behind.
        share: Of each matrix's rows that were looked at.
        total: Everything.
        parts: (layer, projection) -> its figures, in the order of layers.
        worst: The groups with the largest errors.
    """

    destination: Path
    source: Path | None
    without: str
    manifest: Manifest | None
    share: float
    total: Figures = field(default_factory=Figures)
    parts: dict[Key, Figures] = field(default_factory=dict)
    worst: list[Group] = field(default_factory=list)

    @property
    def scale_rule(self) -> str:
        """By which scales were chosen."""
        return self.manifest.scale_rule if self.manifest is not None else "unknown"

    @property
    def layers(self) -> list[int]:
        """All layers."""
        return sorted({layer for layer, _ in self.parts})

    @property
    def projections(self) -> list[str]:
        """All projections."""
        return sorted({projection for _, projection in self.parts})

    def of_layer(self, layer: int) -> Figures:
        """Return the figures of a layer's projections together."""
        together = Figures()
        for (at, _), figures in self.parts.items():
            if at == layer:
                together.add(figures)
        return together

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "destination": str(self.destination),
            "source": None if self.source is None else str(self.source),
            "not_compared_because": self.without or None,
            "scale_rule": self.scale_rule,
            "tools": self.manifest.tools if self.manifest is not None else {},
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


def prepare(destination: Path, choice: Choice) -> tuple[Report, list[Matrix]]:
    """Read headers and decide what is to be compared with what. Reads no tensor.

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
    source, without = _source(choice, manifest)
    if source is not None:
        matrices = with_source(matrices, source, manifest)
    folder = None if source is None else source.folder
    return Report(destination, folder, without, manifest, choice.share), matrices


def _source(choice: Choice, manifest: Manifest | None) -> tuple[Checkpoint | None, str]:
    """Return the source to compare with, or None and why there is none."""
    if choice.source is not None:
        return read_checkpoint(choice.source), ""
    if manifest is None:
        return None, "the checkpoint does not say what it was made of; name it with --source"
    folder = Path(manifest.source)
    if not folder.is_dir():
        return None, f"its source, {folder}, is not there any more; name a copy with --source"
    return read_checkpoint(folder), ""


def make_report(
    destination: Path,
    choice: Choice | None = None,
    on_matrices: Callable[[int], None] = lambda count: None,
    on_matrix: Callable[[], None] = lambda: None,
) -> Report:
    """Report on a converted checkpoint.

    Args:
        destination: The checkpoint.
        choice: What to look at.
        on_matrices: Told how many matrices there are before the first one is read.
        on_matrix: Told of each that is done.

    Raises:
        ReportError: The checkpoint or its source is damaged, or they do not belong together.
        OSError: A file cannot be read.
    """
    choice = choice or Choice()
    report, matrices = prepare(destination, choice)
    from kimi_k3.fidelity.measure import measure_all

    on_matrices(len(matrices))
    groups: list[Group] = []
    measured = measure_all(matrices, choice.share, choice.worst)
    for matrix, (figures, found) in zip(matrices, measured, strict=True):
        report.total.add(figures)
        report.parts.setdefault((matrix.layer, matrix.projection), Figures()).add(figures)
        groups = worst([*groups, *found], choice.worst)
        on_matrix()
    report.worst = groups
    return report


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: It cannot be written; what was there before is still there.
    """
    if file.exists() and not file.is_file():
        # A pipe or a device cannot be replaced.
        file.write_text(text, encoding="utf-8")
        return
    handle, partial = tempfile.mkstemp(prefix=f".{file.name[:100]}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as written:
            written.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(partial).chmod(0o666 & ~umask)
        Path(partial).replace(file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
