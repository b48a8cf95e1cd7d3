# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One worker process: jobs come through a pipe, and what became of them goes back. Ends with its
parent, however that ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from msgspec import Struct

from kimi_k3.convert.manifest import ShardRecord
from kimi_k3.convert.shard import check_shard, convert_shard
from kimi_k3.convert.work_plan import Job

_PR_SET_PDEATHSIG = 1


class Outcome(Struct, frozen=True):
    """What became of one job.

    Attributes:
        name: The shard.
        record: What was read and written, or is there in place of that.
        problems: What is wrong with a shard that was checked.
        error: Why the job could not be done, with the shard's or a file's name.
        errno: Of the operating system's error, if it was one.
    """

    name: str
    record: ShardRecord | None = None
    problems: list[str] = []
    error: str | None = None
    errno: int | None = None


def run_job(job: Job, on_bytes: Callable[[int], None]) -> Outcome:
    """Do one job, and never raise for what is wrong with it."""
    try:
        if job.expected is None:
            return Outcome(job.name, convert_shard(job, on_bytes))
        record, problems = check_shard(job, job.expected, on_bytes)
        return Outcome(job.name, record, problems)
    except OSError as error:
        # The temporary name says nothing to anybody.
        ours = error.filename is None or str(error.filename) == str(job.result)
        where = job.name if ours else error.filename
        return Outcome(job.name, error=f"{where}: {error.strerror or error}", errno=error.errno)
    except ValueError as error:
        return Outcome(job.name, error=str(error))
    except Exception as error:
        return Outcome(job.name, error=f"{job.name}: {type(error).__name__}: {error}")


def main() -> None:
    """Work until the pipe ends. Arguments: the parent's process id, and the pipe's descriptor."""
    parent, descriptor = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    pipe: Connection = Connection(descriptor)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        # Counts of bytes on the way, and the outcome.
        pipe.send(run_job(job, pipe.send))
