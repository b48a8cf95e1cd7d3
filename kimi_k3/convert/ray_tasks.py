# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Jobs as tasks of a Ray cluster that runs already, one per shard.

Source and destination must lie under the same paths on all its machines, and this project be
installed there. Files get their names from here, so a task that is lost leaves nothing behind.
"""

import logging
from collections.abc import Callable, Generator
from typing import Any

from kimi_k3.convert.options import ConversionFailed
from kimi_k3.convert.signals import handlers_kept
from kimi_k3.convert.work_plan import Job
from kimi_k3.convert.worker import Outcome, run_job

# For tasks to end that were told to.
_PATIENCE = 30.0


def run_ray(jobs: list[Job], on_bytes: Callable[[int], None]) -> Generator[Outcome]:
    """Jobs in whatever order they end.

    Args:
        jobs: What to do.
        on_bytes: Told of a shard's bytes when it is done.

    Raises:
        ConversionFailed: Ray is not installed, or no cluster runs.
    """
    ray = connect()
    from ray.exceptions import RayError

    pending: dict[Any, Job] = {}
    try:
        for job in jobs:
            gpus = 1 if job.device == "cuda" else 0
            remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_task)
            pending[remote.remote(job)] = job
        while pending:
            [ready], _ = ray.wait(list(pending), num_returns=1)
            job = pending.pop(ready)
            try:
                count, outcome = ray.get(ready)
            except RayError as error:
                reason = str(error).strip().splitlines()[0]
                outcome = Outcome(job.name, error=f"{job.name}: its task was lost: {reason}")
            else:
                on_bytes(count)
            yield outcome
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
        if pending:
            ray.wait(list(pending), num_returns=len(pending), timeout=_PATIENCE)
        ray.shutdown()


def connect() -> Any:
    """The module `ray`, connected to a cluster.

    Raises:
        ConversionFailed: It is not installed, or no cluster runs.
    """
    try:
        import ray
    except ImportError as error:
        raise ConversionFailed("--ray needs Ray: pip install 'vllm-kimi-k3[ray]'") from error
    if ray.is_initialized():
        return ray
    try:
        with handlers_kept():
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConversionFailed(
            "--ray: expected a Ray cluster, found none running here. Start one (ray start --head) "
            "or set RAY_ADDRESS; without --ray, local processes do the work"
        ) from error
    return ray


def _task(job: Job) -> tuple[int, Outcome]:
    # Ray gives a task of one core OMP_NUM_THREADS=1.
    counts: list[int] = []
    outcome = run_job(job, counts.append)
    return sum(counts), outcome
