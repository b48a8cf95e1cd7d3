# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a conversion tells while it works: to nobody, or on standard error as a bar on a terminal
and as a line per shard elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kimi_k3.convert.options import shown

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Progress:
    """Tells nobody; to be overridden where somebody looks."""

    def phase(self, what: str, total: int) -> None:
        """Something begins that deals with `total` bytes."""

    def advance(self, count: int) -> None:
        """So many bytes more are dealt with."""

    def shard(self, name: str, done: int, of: int) -> None:
        """A shard is finished: `done` of `of`, those of earlier runs included."""

    def note(self, text: str) -> None:
        """Something that is worth a line and no error."""


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """Progress as standard error can show it."""
    # Here, because workers import this module and need no terminal.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shards]}"),
    )
    with Bars(*columns, console=console) as bars:
        yield _Bar(bars)


class _Lines(Progress):
    def shard(self, name: str, done: int, of: int) -> None:
        self.note(f"{done} of {of}: {shown(name)}")

    def note(self, text: str) -> None:
        # Hours of work do not end because nobody reads about them any more.
        with suppress(OSError, ValueError, AttributeError):
            print(text, file=sys.stderr, flush=True)


class _Bar(Progress):
    def __init__(self, bars: "Bars") -> None:
        self.bars = bars
        self.task: TaskID | None = None
        self.done = self.total = 0
        self.begun = 0.0

    def phase(self, what: str, total: int) -> None:
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.done, self.total, self.begun = 0, total, time.monotonic()
        self.task = self.bars.add_task(what, total=total, amount="", shards="")

    def advance(self, count: int) -> None:
        if self.task is None:
            return
        self.done += count
        speed = self.done / max(time.monotonic() - self.begun, 1e-3)
        amount = f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {speed / 1e9:.2f} GB/s"
        self.bars.update(self.task, advance=count, amount=amount)

    def shard(self, name: str, done: int, of: int) -> None:
        if self.task is not None:
            self.bars.update(self.task, shards=f"{done} of {of} shards")

    def note(self, text: str) -> None:
        self.bars.console.print(text, markup=False, highlight=False)
