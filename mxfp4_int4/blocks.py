# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How experts are cut into blocks, and blocks spread over threads. Never looks at a byte."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from .layouts import AITER_ROWS

Job = TypeVar("Job")


def slabs(
    shape: tuple[int, int, int], chunk_experts: int, limit: int
) -> Iterator[tuple[slice, slice]]:
    """Expert and row ranges of at most `chunk_experts` experts and about `limit` packed bytes, for
    experts [E, N, K]. A range of several experts is of all their rows."""
    e, n, k = shape
    expert_bytes = n * k // 2
    if expert_bytes <= limit:
        step = min(chunk_experts, max(1, limit // max(1, expert_bytes)))
        for start in range(0, e, step):
            yield slice(start, min(e, start + step)), slice(0, n)
        return
    rows = max(AITER_ROWS, limit // (k // 2) // AITER_ROWS * AITER_ROWS)
    for expert in range(e):
        for start in range(0, n, rows):
            yield slice(expert, expert + 1), slice(start, min(n, start + rows))


def scale_part(scale: torch.Tensor, layout: str, experts: slice, rows: slice) -> torch.Tensor:
    """Where the scales of some experts and rows lie in a buffer of `layouts.scale_shape`."""
    return scale[experts, :, rows] if layout == "aiter" else scale[experts, rows]


def _next(queue: deque[Job]) -> Job | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


def run_blocks(
    jobs: Iterable[Job], threads: int, worker: Callable[[], Callable[[Job], None]]
) -> None:
    """Give every job to one of at most `threads` threads, each with a `worker()` of its own. A
    failure or Ctrl-C waits for the jobs that have begun, and no other one begins."""
    queue = deque(jobs)
    threads = min(threads, len(queue))
    inference = torch.is_inference_mode_enabled()  # torch keeps it per thread

    def run(_: int) -> None:
        with torch.inference_mode(inference):
            work = worker()
            while (job := _next(queue)) is not None:
                try:
                    work(job)
                except BaseException:
                    queue.clear()
                    raise

    if threads <= 1:
        run(0)
        return
    with _Workers(threads) as pool:
        try:
            for _ in pool.map(run, range(threads)):
                pass
        except BaseException:
            queue.clear()
            raise


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread's first question takes the count from the process, once


class _Workers(ThreadPoolExecutor):
    """Threads whose torch operations do not start threads of their own.

    torch keeps OpenMP's thread count per calling thread, but MKL's and that of threads yet to
    start is the one set last, so the caller's is set again once every worker has its own.
    """

    def __init__(self, threads: int) -> None:
        outer = torch.get_num_threads()
        super().__init__(threads, initializer=_use_one_thread)
        ready = Barrier(threads + 1)
        try:
            for _ in range(threads):
                self.submit(ready.wait)
            ready.wait()
        except BaseException:
            ready.abort()
            raise
        finally:
            torch.set_num_threads(outer)
