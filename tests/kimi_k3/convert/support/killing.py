# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Conversions that die of signal 9, at a moment or at a call, and are resumed. Run as a script.

    python -m tests.kimi_k3.convert.support.killing SOURCE FOLDER EXPECTED.json moments 30 SEED
    python -m tests.kimi_k3.convert.support.killing SOURCE FOLDER EXPECTED.json calls STEP

torch is imported once; every conversion is a fork of this process, so that most of its life is
work and not start-up. EXPECTED.json holds the digests of an uninterrupted run. Prints JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kimi_k3 import convert as conversion
from tests.kimi_k3.convert.support.files import digests

# All that changes what is on disk.
CALLS = ("pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir")


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child that leaves no trace in this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)
    return child


def convert(source: Path, out: Path, resume: bool) -> None:
    conversion.convert_checkpoint(source, out, conversion.ConvertOptions(workers=1, resume=resume))


def die_at(call: int) -> Callable[[], int]:
    """Let this process die instead of its `call`-th change of the disk; never for 0."""
    seen = 0

    def wrapped(original):
        def counted(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
    return lambda: seen


def finish(source: Path, out: Path, expected: dict[str, str], what: str) -> None:
    """Resume to the end and compare."""
    _, status = os.waitpid(fork(lambda: convert(source, out, True)), 0)
    if status:
        raise SystemExit(f"{what}: the resumed run failed")
    if digests(out) != expected:
        raise SystemExit(f"{what}: other files than an uninterrupted run writes")
    shutil.rmtree(out)


def moments(source: Path, out: Path, expected: dict[str, str], count: int, seed: int) -> dict:
    """Kill `count` runs at random moments, each resuming what the one before has left."""
    generator = random.Random(seed)
    start = time.monotonic()
    _, status = os.waitpid(fork(lambda: convert(source, out, False)), 0)
    duration = time.monotonic() - start
    assert status == 0
    assert digests(out) == expected
    shutil.rmtree(out)
    killed = runs = unfinished = 0
    while killed < count:
        resume = out.exists()
        child = fork(lambda resume=resume: convert(source, out, resume))
        time.sleep(generator.uniform(0, duration / 2))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            unfinished += (out / ".kimi_k3_conversion").exists()
        else:
            assert status == 0
            runs += 1
            if digests(out) != expected:
                raise SystemExit("a resumed run: other files than an uninterrupted run writes")
            shutil.rmtree(out)
    if out.exists():
        finish(source, out, expected, "the last run")
    return {"killed": killed, "in_the_middle": unfinished, "seconds_of_a_run": duration}


def calls(source: Path, out: Path, expected: dict[str, str], step: int) -> dict:
    """Kill a run at every `step`-th change of the disk, and resume it to the end."""
    read, write = os.pipe()

    def count() -> None:
        seen = die_at(0)
        convert(source, out, False)
        os.write(write, str(seen()).encode())

    _, status = os.waitpid(fork(count), 0)
    assert status == 0
    assert digests(out) == expected
    shutil.rmtree(out)
    total = int(os.read(read, 100))

    def killed_run(call: int, resume: bool) -> None:
        def work() -> None:
            die_at(call)
            convert(source, out, resume)

        _, status = os.waitpid(fork(work), 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL

    for call in range(1, total + 1, step):
        killed_run(call, False)
        if call % 2 and (out / ".kimi_k3_conversion" / "plan.json").exists():
            # The resumed run dies as well, early: while it sweeps or proves.
            killed_run(1 + call % 7, True)
        finish(source, out, expected, f"call {call} of {total}")
    return {"calls": total}


def main() -> None:
    source, out, expected = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    import torch

    torch.set_num_threads(1)
    import mxfp4_int4  # noqa: F401

    how = {"moments": moments, "calls": calls}[sys.argv[4]]
    numbers = (int(number) for number in sys.argv[5:])
    print(json.dumps(how(source, out, json.loads(Path(expected).read_text()), *numbers)))


if __name__ == "__main__":
    main()
