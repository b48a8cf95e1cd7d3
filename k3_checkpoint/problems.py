# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What can be wrong with a checkpoint: a kind to decide by, and words to print."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is wrong."""

    FOLDER = "folder"  # no folder, or no shard in it
    CONFIG = "config"  # config.json is not there, or of no use
    INDEX = "index"  # the index is of no use
    MISSING = "missing"  # a shard that the index or the other shards' names promise
    SHARD = "shard"  # a shard that cannot be read, or is damaged
    UNNAMED = "unnamed"  # a shard that the index does not name
    TWICE = "twice"  # a tensor in two shards
    MISPLACED = "misplaced"  # a tensor that the index places elsewhere
    UNINDEXED = "unindexed"  # a tensor that the index does not name
    TENSOR = "tensor"  # a tensor that the model lacks, or of another shape


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        kind: What to decide by.
        subject: File or tensor; empty for the folder itself.
        text: What is wrong with it.
    """

    kind: Kind
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{shown(self.subject)}: {self.text}" if self.subject else self.text


def shown(name: str) -> str:
    """Return a name as one printable line, whatever characters it has."""
    return name if name and name.isprintable() else repr(name)


def listed(problems: list[str], most: int) -> list[str]:
    """Return the first problems, and the number of those left out, as lines of a message."""
    more = len(problems) - most
    lines = [f"  - {problem}" for problem in problems[:most]]
    return [*lines, f"  - and {more} more"] if more > 0 else lines
