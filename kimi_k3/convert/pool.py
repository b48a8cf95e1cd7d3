# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Jobs done in this process or in worker processes. Knows nothing of what a job is for.

Workers are plain child processes with pipes: one that is killed is noticed by name, and none
outlives its parent.
"""

import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from kimi_k3.convert.shard import Job
from kimi_k3.convert.signals import held_back
from kimi_k3.convert.worker import run

_WORKER = "kimi_k3.convert.worker"
_READ = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What became of one job: an answer of `worker.run`, or the end of the process."""

    name: str
    found: dict[str, Any]


def run_here(jobs: list[Job], on_bytes: Callable[[int], None]) -> Generator[Outcome]:
    """One job after the other, in this process."""
    if jobs:
        with held_back():
            importlib.import_module("torch")
    for job in jobs:
        yield Outcome(job.name, run(job, on_bytes))


def run_workers(
    jobs: list[Job],
    workers: int,
    on_bytes: Callable[[int], None],
    keep_open: tuple[int, ...] = (),
) -> Generator[Outcome]:
    """Jobs in worker processes, in whatever order they end.

    Args:
        jobs: What to do; the first ones are begun first.
        workers: How many processes.
        on_bytes: Called here with what the workers report.
        keep_open: Descriptors that every worker holds too.
    """
    waiting = list(reversed(jobs))
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    team: dict[IO[bytes], _Worker] = {}
    with selectors.DefaultSelector() as selector:

        def begin(count: int) -> None:
            # All of them import torch before the first is waited for to take its job.
            new = [_Worker.start(threads, keep_open, waiting.pop()) for _ in range(count)]
            team.update({worker.answers: worker for worker in new})
            for worker in new:
                selector.register(worker.answers, selectors.EVENT_READ)
                worker.give(worker.job)

        try:
            begin(min(workers, len(jobs)))
            while team:
                for key, _ in selector.select():
                    worker = team[key.fileobj]  # type: ignore[index]
                    answers = worker.read()
                    if answers is None:
                        selector.unregister(worker.answers)
                        del team[worker.answers]
                        yield Outcome(worker.job.name, {"error": worker.obituary()})
                        begin(min(1, len(waiting)))
                        continue
                    for answer in answers:
                        if "bytes" in answer:
                            on_bytes(answer["bytes"])
                            continue
                        yield Outcome(worker.job.name, answer)
                        if waiting:
                            worker.give(waiting.pop())
                        else:
                            selector.unregister(worker.answers)
                            del team[worker.answers]
                            worker.end()
        finally:
            for worker in team.values():
                worker.kill()


@dataclass
class _Worker:
    process: subprocess.Popen
    answers: IO[bytes]
    errors: IO[bytes]
    job: Job
    rest: bytes = b""

    @classmethod
    def start(cls, threads: int, keep_open: tuple[int, ...], job: Job) -> "_Worker":
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker ends
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(os.getpid()), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=keep_open,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            # Ctrl-C is the parent's to deal with.
            start_new_session=True,
        )
        assert process.stdout is not None
        return cls(process, process.stdout, errors, job)

    def give(self, job: Job) -> None:
        self.job = job
        assert self.process.stdin is not None
        # Where it is dead its answers end, and that is where it is noticed.
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job.as_dict()).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[dict[str, Any]] | None:
        """Complete answers that are there; None at the end."""
        data = os.read(self.answers.fileno(), _READ)
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def obituary(self) -> str:
        """Why it ended, in a line."""
        status = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        self._close()
        if status < 0:
            what = f"its worker was killed by signal {-status}"
            what += " (out of memory?)" if status == -9 else ""
        else:
            what = f"its worker ended with exit code {status}"
        return f"{self.job.name}: {what}" + "".join(f": {line}" for line in last)

    def end(self) -> None:
        """Let it go, its work being done."""
        self._close()
        self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.answers, self.errors):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
