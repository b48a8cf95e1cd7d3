# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Signals that stop a conversion: raised where they can be, and nowhere else."""

import os
import signal
import threading

import pytest

from kimi_k3.convert.signals import (
    STOPS,
    Stopped,
    handlers_kept,
    held_back,
    stops_interrupt,
)


@pytest.fixture(autouse=True)
def handlers_as_before():
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    assert {number: signal.getsignal(number) for number in STOPS} == before


@pytest.mark.parametrize("number", STOPS)
def test_a_stop_is_raised(number):
    with pytest.raises(Stopped) as stopped, stops_interrupt():
        os.kill(os.getpid(), number)
    assert stopped.value.number == number
    assert isinstance(stopped.value, KeyboardInterrupt)


@pytest.mark.parametrize("number", STOPS)
def test_an_ignored_signal_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stops_interrupt():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_another_thread_works_without():
    done = []

    def work() -> None:
        with stops_interrupt(), handlers_kept():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_library_changes_no_handler():
    with stops_interrupt():
        mine = signal.getsignal(signal.SIGTERM)
        with handlers_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_that_is_held_back_comes_afterwards(number):
    passed = []

    def work() -> None:
        with held_back():
            # To this thread: others, torch's for example, hold nothing back.
            signal.pthread_kill(threading.get_ident(), number)
            passed.append("held")
        passed.append("too far")

    with pytest.raises(Stopped), stops_interrupt():
        work()
    assert passed == ["held"]
