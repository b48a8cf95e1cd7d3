# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a caller can choose, and the error that a caller gets."""

import errno
from dataclasses import dataclass
from pathlib import Path

SCALE_RULES = ("mse", "absmax")
DEVICES = ("cpu", "cuda")
_SHOWN = 100


class ConversionFailed(ValueError):
    """A checkpoint cannot be converted, or not here; the message says what to do.

    Attributes:
        problems: Every single one; the message shows the first hundred.
    """

    def __init__(self, summary: str, problems: list[str] | None = None, advice: str = "") -> None:
        self.summary = summary
        self.problems = problems or []
        self.advice = advice
        lines = [f"  - {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"  - and {len(self.problems) - _SHOWN} more")
        super().__init__("\n".join([summary, *lines, *([advice] if advice else [])]))


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        scale_rule: "mse", or "absmax" for comparison; see docs/conversion.md.
        workers: Processes; 1 works in this one, None chooses by cores and size.
        ray: One task per shard on a running Ray cluster instead of local processes.
        resume: Continue in a destination that an earlier run has begun, or repair a finished one.
        verify: Prove the finished result: see `verify`.
        device: Where the arithmetic is done; the bits are the same.
        include: Globs of module names; only matching modules are converted. Empty: all.
        exclude: Globs of module names that stay as they are.

    Raises:
        ValueError: A choice that does not exist.
    """

    scale_rule: str = "mse"
    workers: int | None = None
    ray: bool = False
    resume: bool = False
    verify: bool = False
    device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in (("scale_rule", SCALE_RULES), ("device", DEVICES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, found {value!r}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers: expected 1 or more, found {self.workers}")
        if self.ray and self.workers is not None:
            raise ValueError("workers: with ray, the cluster decides how many tasks run at a time")


def shown(path: Path | str) -> str:
    """A path or a name as one printable line, whatever characters it has."""
    text = str(path)
    return text if text and text.isprintable() else repr(text)


def resolved(path: Path) -> Path:
    """A path without links; what it names need not be there.

    Raises:
        ConversionFailed: Its links lead in a circle, or it cannot be looked at.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        what = "its links lead in a circle" if error.errno == errno.ELOOP else error.strerror
        raise ConversionFailed(f"{shown(path)}: {what}. Nothing was written") from error
    return path.resolve()
