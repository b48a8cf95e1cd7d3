# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One worker process: jobs as lines of JSON on standard input, what became of them on standard
output. Ends with its parent, however that ends."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kimi_k3.convert.check import check_shard
from kimi_k3.convert.shard import Job, convert_shard

_PR_SET_PDEATHSIG = 1
_REPORT_SECONDS = 0.2


def main(parent: int, threads: int) -> None:
    """Work until standard input ends.

    Args:
        parent: Process id of who started this one.
        threads: Of torch.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # Nothing that a library prints may come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**found: Any) -> None:
        print(json.dumps(found), file=answers, flush=True)

    import torch

    torch.set_num_threads(threads)
    for line in sys.stdin:
        answer(**run(Job.from_dict(json.loads(line)), lambda count: answer(bytes=count)))


def run(job: Job, on_bytes: Callable[[int], None]) -> dict[str, Any]:
    """Do one job and say what became of it, as JSON can hold it."""
    report = _Throttled(on_bytes)
    found: dict[str, Any]
    try:
        if job.expected is None:
            found = {"record": asdict(convert_shard(job, report))}
        else:
            found = {"problems": check_shard(job, report)}
    except OSError as error:
        # The temporary name says nothing to anybody.
        where = job.name if error.filename in (None, job.partial) else error.filename
        return {"error": f"{where}: {error.strerror or error}", "errno": error.errno}
    except ValueError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{job.name}: {type(error).__name__}: {error}"}
    report.flush()
    return found


class _Throttled:
    """Passes on counts of bytes, added up, a few times a second."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self.on_bytes = on_bytes
        self.count = 0
        self.last = time.monotonic()

    def __call__(self, count: int) -> None:
        self.count += count
        if time.monotonic() - self.last >= _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.on_bytes(self.count)
        self.count = 0
        self.last = time.monotonic()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
