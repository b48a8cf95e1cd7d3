# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 convert` as a user meets it: words, JSON, exit codes, Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.write import write_checkpoint

SCRIPT = Path(sys.executable).with_name("kimi-k3")
# As wide as the longest line, so that words stay together.
ENVIRONMENT = {**os.environ, "COLUMNS": "200"}


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT, "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT | environment,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "source"
    spec = replace(PRESETS["tiny"], layers=2, experts=4, vision=None)
    write_checkpoint(folder, spec, shards=3)
    return folder


@pytest.mark.slow
def test_from_plan_to_proof(source, tmp_path):
    """Dry run, conversion, refusal, verification, damage, repair."""
    out = tmp_path / "out"
    planned = run(source, out, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "12 modules to int4 by mse" in planned.stdout
    assert "Nothing was written." in planned.stdout
    assert not out.exists()

    done = run(source, out, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["modules"], found["shards"]) == (12, 3)
    assert found["bytes_out"] == sum(f.stat().st_size for f in out.glob("*.safetensors"))
    # In a pipe: a line for each shard, and nothing that moves.
    assert [line[:7] for line in done.stderr.splitlines()] == ["1 of 3:", "2 of 3:", "3 of 3:"]

    again = run(source, out, "--json")
    assert again.returncode == 1
    assert "found a finished conversion" in json.loads(again.stdout)["error"]

    shard = next(out.glob("*.safetensors"))
    os.truncate(shard, 1000)
    wrong = run(source, out, "--verify", "--json")
    assert wrong.returncode == 1
    [problem] = json.loads(wrong.stdout)["problems"]
    assert problem.startswith(f"{shard.name}: truncated")

    repaired = run(source, out, "--resume")
    assert repaired.returncode == 0, repaired.stderr
    assert "1 of 3 shards converted, the others kept" in repaired.stdout


def test_a_plan_in_json(source, tmp_path):
    found = json.loads(run(source, tmp_path / "out", "--dry-run", "--json").stdout)
    assert found["modules_to_convert"] == 12
    assert found["destination_state"] == "new"
    assert found["shards"].keys() == {file.name for file in source.glob("*.safetensors")}
    assert found["bytes_out"] > found["bytes_in"] // 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{source}", "{source}"), 1, "that is the source"),
        (("{source}", "{out}/" + "x" * 300), 1, "File name too long. Nothing was written"),
        (("{out}/nowhere", "{out}/x"), 1, "expected a checkpoint's folder, found none"),
        (("nobody/nothing", "{out}/x"), 1, "a model in the local hub cache, found neither"),
        (("{source}", "{out}/x", "--scale-rule=best"), 2, "best"),
        (("{source}", "{out}/x", "--workers=0"), 2, "--workers"),
        (("{source}", "{out}/x", "--ray", "--workers=2"), 2, "the cluster decides"),
        (("{source}", "{out}/x", "--include=*w1"), 1, "expected all or none"),
    ],
)
def test_refusals_are_words_and_an_exit_code(source, tmp_path, arguments, code, message):
    process = run(*(a.format(source=source, out=tmp_path) for a in arguments))
    assert process.returncode == code, process.stderr
    assert message in re.sub(r"[│\s]+", " ", process.stderr)
    assert "Traceback" not in process.stderr
    assert not list(tmp_path.iterdir())


def test_a_model_in_the_hub_cache(source, tmp_path):
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    for file in source.iterdir():
        (snapshot / file.name).symlink_to(file)
    process = run("some/model", tmp_path / "out", HF_HUB_CACHE=str(tmp_path / "hub"))
    assert process.returncode == 0, process.stderr
    manifest = json.loads((tmp_path / "out" / "kimi_k3_conversion.json").read_text())
    assert manifest["source"] == str(snapshot)


def test_it_goes_on_when_nobody_reads_about_it(source, tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [SCRIPT, "convert", source, tmp_path / "out"]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=write, check=False)
    os.close(write)
    assert process.returncode == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_on_a_terminal_there_is_a_bar(source, tmp_path):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [SCRIPT, "convert", source, tmp_path / "out"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=ENVIRONMENT | {"TERM": "xterm"},
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    assert process.wait() == 0
    assert b"GB/s" in shown
    assert b"3 of 3 shards" in shown


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=lambda stop: stop.name)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stop_is_one_line_and_can_be_resumed(tmp_path, workers, stop):
    """As a terminal or a batch system does it: the signal goes to the whole group of processes."""
    spec = replace(PRESETS["tiny"], layers=4, experts=64, vision=None)
    write_checkpoint(tmp_path / "source", spec, shards=40)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [SCRIPT, "convert", tmp_path / "source", out, f"--workers={workers}"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(out.glob("*.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, stop)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + stop, errors
    lines = [line for line in errors.splitlines() if not re.match(r"\d+ of 40: ", line)]
    assert lines == ["interrupted; finished shards are kept, --resume goes on"]
    assert not list(out.rglob("*.partial"))
    assert not (out / "model.safetensors.index.json").exists()
    resumed = run(tmp_path / "source", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "the others kept" in resumed.stdout
