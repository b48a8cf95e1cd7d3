# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Worker processes: one that is killed is named and the others go on; none outlives its parent."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from kimi_k3.convert import (
    ConversionFailed,
    ConvertOptions,
    convert_checkpoint,
    pool,
)
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.work_plan import make_plan
from tests.kimi_k3.convert.support.files import digests

SHARD = "model-00002-of-000004.safetensors"


def workers_of_this_process() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if any(pool._WORKER in part for part in child.cmdline())
    ]


def test_a_killed_worker_is_named_and_the_rest_is_kept(source, result, tmp_path, monkeypatch):
    given = pool._Worker.give

    def killing(self, job):
        if job.name == SHARD:
            self.process.kill()
            self.process.wait()
        given(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(pool._Worker, "give", killing)
        with pytest.raises(ConversionFailed, match="1 of 4 shards") as failure:
            convert_checkpoint(source, tmp_path / "out", ConvertOptions(workers=2))
    [problem] = failure.value.problems
    assert problem.startswith(f"{SHARD}: its worker was killed by signal 9 (out of memory?)")
    assert "--resume" in failure.value.advice
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(workers=2, resume=True))
    assert digests(tmp_path / "out") == digests(result)
    assert workers_of_this_process() == []


def test_a_worker_that_cannot_start_says_why(source, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_WORKER", "no.such.thing")
    with pytest.raises(ConversionFailed, match="4 of 4 shards") as failure:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(workers=2))
    assert "its worker ended with exit code 1: " in failure.value.problems[0]
    assert not (tmp_path / "out").exists()


def test_interrupted_workers_end_and_leave_nothing_incomplete(source, result, tmp_path):
    class Interrupting(Progress):
        def shard(self, name, done, of):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(workers=2), Interrupting())
    assert workers_of_this_process() == []
    assert not list(Path(tmp_path / "out").rglob("*.partial"))
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(resume=True))
    assert digests(tmp_path / "out") == digests(result)


def test_an_error_names_the_shard_and_no_temporary_file(source, tmp_path):
    plan = make_plan(source, ConvertOptions())
    [outcome] = pool.run_here([plan.job(SHARD, tmp_path / "no" / "x.partial")], lambda count: None)
    assert outcome.error == f"{SHARD}: No such file or directory"
