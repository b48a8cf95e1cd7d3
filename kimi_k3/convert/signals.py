# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Signals that stop a conversion end it as Ctrl-C does, with nothing incomplete left behind.

Knows nothing of conversions.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

# Of batch systems and service managers, and of a terminal that is closed.
STOPS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """One of `STOPS`.

    Attributes:
        number: Which.
    """

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def stops_interrupt() -> Iterator[None]:
    """Let `STOPS` raise `Stopped`, except those that whoever began this process has ignored.

    Only the main thread may say what a signal does; in another one nothing changes.
    """
    changed = {}
    if threading.current_thread() is threading.main_thread():
        changed = {n: h for n in STOPS if callable(h := signal.getsignal(n)) or h == signal.SIG_DFL}

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(number)

    for number in changed:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Undo what a library's start does to signals, Ray's for one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *STOPS)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Let a signal wait until the block is done: an exception in the middle of an import of numpy
    or torch is lost there, or leaves half a module."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *STOPS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
