# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Where jobs are done: in this process, in worker processes, or as tasks of a Ray cluster.

Workers are plain child processes with a pipe each: one that is killed is named with its shard and
its last words, and none outlives its parent. pebble 5.2 was tried and leaves a worker at its job,
and a helper process beside it, when the parent is killed.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO

from kimi_k3.convert.kernel import needs_torch
from kimi_k3.convert.options import ConvertOptions
from kimi_k3.convert.ray_tasks import run_ray
from kimi_k3.convert.signals import held_back
from kimi_k3.convert.work_plan import Job
from kimi_k3.convert.worker import Outcome, run_job

_WORKER = "kimi_k3.convert.worker"
# Below this one process is done before another has started.
_ALONE_BYTES = 1 << 30
# More workers read and write more shards at once than disks like; their threads fill the cores.
_MOST_WORKERS = 8


def worker_count(options: ConvertOptions, shards: int, size: int) -> int:
    """How many processes share so many shards of so many bytes in all."""
    if options.workers is not None:
        return min(options.workers, max(1, shards))
    if size < _ALONE_BYTES:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), shards, _MOST_WORKERS))


def run_jobs(
    jobs: list[Job],
    options: ConvertOptions,
    size: int,
    on_bytes: Callable[[int], None],
    keep_open: tuple[int, ...] = (),
) -> Generator[Outcome]:
    """Do jobs wherever the options say, in whatever order they end.

    Args:
        jobs: What to do; the first ones are begun first.
        options: Of the conversion.
        size: Bytes that all of them read.
        on_bytes: Told of bytes as they are dealt with.
        keep_open: Descriptors that every worker process holds too.
    """
    if options.ray:
        return run_ray(jobs, on_bytes)
    workers = worker_count(options, len(jobs), size)
    if workers == 1:
        return run_here(jobs, on_bytes)
    return run_workers(jobs, workers, on_bytes, keep_open)


def run_here(jobs: list[Job], on_bytes: Callable[[int], None]) -> Generator[Outcome]:
    """One job after the other, in this process."""
    if any(needs_torch(job.device) for job in jobs):
        with held_back():
            importlib.import_module("torch")
    for job in jobs:
        yield run_job(job, on_bytes)


def run_workers(
    jobs: list[Job],
    workers: int,
    on_bytes: Callable[[int], None],
    keep_open: tuple[int, ...] = (),
) -> Generator[Outcome]:
    """Jobs in so many worker processes; see `run_jobs`."""
    waiting = list(reversed(jobs))
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    team: dict[Connection, _Worker] = {}

    def begin(count: int) -> None:
        # All of them are starting before the first is waited for to take its job.
        new = [_Worker.start(threads, keep_open, waiting.pop()) for _ in range(count)]
        team.update({worker.pipe: worker for worker in new})
        for worker in new:
            worker.give(worker.job)

    try:
        begin(min(workers, len(jobs)))
        while team:
            for pipe in wait(list(team)):
                worker = team[pipe]  # type: ignore[index]
                try:
                    answer = worker.pipe.recv()
                except (EOFError, OSError):
                    del team[worker.pipe]
                    yield Outcome(worker.job.name, error=worker.cause_of_end())
                    begin(min(1, len(waiting)))
                    continue
                if isinstance(answer, int):
                    on_bytes(answer)
                    continue
                yield answer
                if waiting:
                    worker.give(waiting.pop())
                else:
                    del team[worker.pipe]
                    worker.end()
    finally:
        for worker in team.values():
            worker.process.kill()
            worker.end()


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    errors: IO[bytes]
    job: Job

    @classmethod
    def start(cls, threads: int, keep_open: tuple[int, ...], job: Job) -> "_Worker":
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker ends
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", f"from {_WORKER} import main; main()"),
                    *(str(os.getpid()), str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(theirs.fileno(), *keep_open),
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                # Ctrl-C is the parent's to deal with.
                start_new_session=True,
            )
        return cls(process, ours, errors, job)

    def give(self, job: Job) -> None:
        self.job = job
        # Where it is dead its answers end, and that is where it is noticed.
        with suppress(OSError):
            self.pipe.send(job)

    def cause_of_end(self) -> str:
        """Why it ended before its job, in a line."""
        status = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        self.end()
        if status < 0:
            what = f"its worker was killed by signal {-status}"
            what += " (out of memory?)" if status == -9 else ""
        else:
            what = f"its worker ended with exit code {status}"
        return f"{self.job.name}: {what}" + "".join(f": {line}" for line in last)

    def end(self) -> None:
        """Let it go."""
        self.pipe.close()
        self.process.wait()
        self.errors.close()
