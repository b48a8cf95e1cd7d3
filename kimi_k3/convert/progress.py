# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a conversion tells while it works; this one tells nobody."""


class Progress:
    """To be overridden where somebody looks.

    Attributes:
        shards: How many were dealt with in the last phase.
    """

    shards = 0

    def phase(self, what: str, total: int) -> None:
        """Something begins that deals with `total` bytes."""
        self.shards = 0

    def advance(self, count: int) -> None:
        """So many bytes more are dealt with."""

    def shard(self, name: str, done: int, of: int) -> None:
        """A shard is finished: `done` of `of`, those of earlier runs included."""
        self.shards += 1

    def note(self, text: str) -> None:
        """Something that is worth a line and no error."""
