# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Progress that keeps what it is told in words."""

from kimi_k3.convert.progress import Progress


class Notes(Progress):
    """Progress with its notes in a list."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        # How many shards were dealt with in the last phase.
        self.shards = 0

    def phase(self, what: str, total: int) -> None:
        self.shards = 0

    def shard(self, name: str, done: int, of: int) -> None:
        self.shards += 1

    def note(self, text: str) -> None:
        self.notes.append(text)
