# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Runs jobs on real vLLM engines, in a process of its own.

`run_jobs` is called by tests. It starts this file as a script, which reads jobs from a JSON file
and writes the answers to another. The engine core runs inside the script, where it starts in
seconds; several ranks get workers as in production. `k3_server` is for all of production's parts.
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Tiny layers gain nothing from a second thread, and one that waits for a busy core costs a lot.
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Job:
    """One engine and the requests that it serves greedily.

    Attributes:
        checkpoint: folder.
        prompts: token ids.
        args: of `vllm.LLM`, beyond what every job has.
        max_tokens: of each answer.
        stagger: engine steps between arrivals; 0 lets all requests arrive at once.
        stock_zeroing: undo the amendment of `CPUModelRunner._zero_block_ids`.

    """

    checkpoint: str
    prompts: list[list[int]]
    args: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 64
    stagger: int = 0
    stock_zeroing: bool = False


@dataclass
class Answer:
    """Generated token ids and the logprob of each."""

    tokens: list[int]
    logprobs: list[float]


def bind(ranks: int) -> str:
    """Value of VLLM_CPU_OMP_THREADS_BIND: a core for each of several ranks, or no binding."""
    return "nobind" if ranks == 1 else "|".join(str(rank) for rank in range(ranks))


def run_jobs(jobs: list[Job], folder: Path, timeout: float = 300) -> list[list[Answer]]:
    """Run jobs one after another in one fresh process.

    Args:
        jobs: all with one rank, or all with more.
        folder: for the exchange and the log.
        timeout: in seconds, for all jobs.

    Returns:
        For each job, the answers in the order of its prompts.

    """
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / "jobs.json", folder / "answers.json"
    source.write_text(json.dumps([asdict(job) for job in jobs]))
    ranks = {job.args.get("tensor_parallel_size", 1) for job in jobs}
    environment = os.environ | ENVIRONMENT
    environment["VLLM_CPU_OMP_THREADS_BIND"] = bind(max(ranks))
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.models.kimi_k3.cpu.support.k3_engine",
                str(source),
                str(target),
            ],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        ).returncode
    if code or not target.exists():
        tail = (folder / "log.txt").read_text()[-6000:]
        raise RuntimeError(f"the engine process ended with {code}:\n{tail}")
    return [[Answer(**answer) for answer in answers] for answers in json.loads(target.read_text())]


def register_kernels_early() -> None:
    """Let engines run in this process: call it before the first of them is made."""
    from vllm.platforms import current_platform

    # An engine in this process does this again, after numba is loaded, and upstream's scan of all
    # modules then stumbles over numba's library objects.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def _main(source: str, target: str) -> None:
    jobs = [Job(**job) for job in json.loads(Path(source).read_text())]
    if all(job.args.get("tensor_parallel_size", 1) == 1 for job in jobs):
        register_kernels_early()
    import vllm

    Path(target).with_name("version.txt").write_text(vllm.__version__)
    answers = [_run(job) for job in jobs]
    Path(target).write_text(json.dumps([[asdict(a) for a in each] for each in answers]))


def _run(job: Job) -> list[Answer]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    if job.stock_zeroing:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner._zero_block_ids = CPUModelRunner._zero_block_ids.__wrapped__
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 1024,
        "max_num_seqs": 16,
    }
    llm = LLM(job.checkpoint, **(defaults | job.args))
    params = SamplingParams(
        temperature=0.0, max_tokens=job.max_tokens, logprobs=1, ignore_eos=True, detokenize=False
    )
    engine = llm.llm_engine
    finished = {}
    arrivals = [(i * job.stagger, i) for i in range(len(job.prompts))]
    step = 0
    while arrivals or engine.has_unfinished_requests():
        while arrivals and arrivals[0][0] <= step:
            _, i = arrivals.pop(0)
            engine.add_request(str(i), {"prompt_token_ids": job.prompts[i]}, params)
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output.outputs[0]
        step += 1
    answers = []
    for i in range(len(job.prompts)):
        tokens = list(finished[i].token_ids)
        chosen = [p[t].logprob for p, t in zip(finished[i].logprobs, tokens, strict=True)]
        answers.append(Answer(tokens, chosen))
    del engine, llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return answers


if __name__ == "__main__":
    _main(*sys.argv[1:])
