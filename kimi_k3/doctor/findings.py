# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a diagnosis is made of: findings with a level, and the verdict that follows from them."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # worth knowing; changes nothing
    WARNING = "warning"  # serves, but not as one may expect
    PROBLEM = "problem"  # will not serve


@dataclass(frozen=True)
class Finding:
    """One row.

    Attributes:
        area: Part of the diagnosis, such as ``machine``.
        subject: What was looked at.
        level: How much it matters.
        text: What was found and, unless all is well, what to do.
    """

    area: str
    subject: str
    level: Level
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings of one run.

    Attributes:
        model: What was asked about; None for the machine alone.
        findings: In the order in which they are shown.
        command: How to serve the model here; None without a model or with a problem.
    """

    model: str | None
    findings: tuple[Finding, ...]
    command: str | None = None

    def of(self, level: Level) -> list[Finding]:
        """Return the findings of one level."""
        return [finding for finding in self.findings if finding.level is level]

    @property
    def ready(self) -> bool:
        """Whether nothing that was found keeps the model from being served here."""
        return not self.of(Level.PROBLEM)

    @property
    def verdict(self) -> str:
        """The diagnosis in one line."""
        what = "this machine can serve Kimi-K3"
        if self.model is not None:
            what = f"{self.model} can be served here"
        problems, warnings = self.of(Level.PROBLEM), self.of(Level.WARNING)
        if problems:
            first = problems[0]
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            text = first.text.splitlines()[0]
            return f"not ready: {first.subject}: {text}{more}"
        if warnings:
            count = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
            return f"ready, with {count}: {what}"
        return f"ready: {what}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "model": self.model,
            "ready": self.ready,
            "verdict": self.verdict,
            "command": self.command,
            "findings": [asdict(finding) for finding in self.findings],
        }


Found = TypeVar("Found")


def attempt(
    area: str, subject: str, probe: Callable[[], Found]
) -> tuple[Found | None, list[Finding]]:
    """Return what a probe returns, or None and a problem that says why it broke."""
    try:
        return probe(), []
    # A package that ends the process on import must not end the diagnosis.
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        text = f"could not be found out: {type(error).__name__}: {reason}"
        return None, [Finding(area, subject, Level.PROBLEM, text)]


def probed(area: str, subject: str, probe: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return a probe's findings; one that breaks becomes a finding that says why."""
    found, broken = attempt(area, subject, lambda: list(probe()))
    return broken if found is None else found
