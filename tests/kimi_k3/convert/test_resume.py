# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Runs that were stopped or killed, files that were damaged, and what a resumed run makes of it."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.write import write_checkpoint
from kimi_k3.convert import (
    ConversionFailed,
    ConvertOptions,
    convert_checkpoint,
)
from kimi_k3.convert.destination import Destination
from kimi_k3.convert.manifest import ShardNote
from kimi_k3.convert.verify import verify_checkpoint
from kimi_k3.convert.work_plan import make_plan
from tests.kimi_k3.convert.support.files import digests
from tests.kimi_k3.convert.support.notes import Notes

RESUME = ConvertOptions(resume=True)
SHARDS = [f"model-{i:05d}-of-000004.safetensors" for i in range(1, 5)]
KILLING = "tests.kimi_k3.convert.support.killing"


@pytest.fixture
def begun(source, tmp_path, monkeypatch) -> Path:
    """A conversion that ended after two shards."""
    folder = tmp_path / "begun"
    real = Destination.write_note

    def twice(self, name, *args):
        if len(list(self.work.glob("*.shard.json"))) == 2:
            raise KeyboardInterrupt
        real(self, name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Destination, "write_note", twice)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, folder)
    return folder


def test_an_interrupted_run_keeps_finished_shards_and_nothing_else(begun):
    assert sorted(file.name for file in begun.iterdir()) == [".kimi_k3_conversion", *SHARDS[:2]]
    assert not list(begun.rglob("*.partial"))


def test_it_is_continued_without_converting_again(source, begun, result):
    then = {name: (begun / name).stat().st_mtime_ns for name in SHARDS[:2]}
    progress = Notes()
    convert_checkpoint(source, begun, RESUME, progress)
    assert progress.notes == []
    assert progress.shards == 2
    assert {name: (begun / name).stat().st_mtime_ns for name in then} == then
    assert digests(begun) == digests(result)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap(one: Path, two: Path) -> None:
    one.rename(one.with_suffix(".x"))
    two.rename(one)
    one.with_suffix(".x").rename(two)


DAMAGES = {
    "missing": (lambda f: (f / SHARDS[0]).unlink(), [f"{SHARDS[0]}: not there"]),
    "flipped": (lambda f: flip(f / SHARDS[1]), [f"{SHARDS[1]}: damaged, expected SHA-256"]),
    "truncated": (
        lambda f: os.truncate(f / SHARDS[1], 100),
        [f"{SHARDS[1]}: truncated, expected"],
    ),
    "longer": (
        lambda f: (f / SHARDS[0]).open("ab").write(b"x"),
        [f"{SHARDS[0]}: too long, expected"],
    ),
    "swapped": (
        lambda f: swap(f / SHARDS[0], f / SHARDS[1]),
        [f"{SHARDS[0]}: holds the bytes of {SHARDS[1]}", f"{SHARDS[1]}: holds the bytes of"],
    ),
}


@pytest.mark.parametrize(("damage", "messages"), DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("which", ["begun", "finished"])
def test_what_is_damaged_is_named_and_written_anew(
    source, result, request, which, damage, messages
):
    folder = request.getfixturevalue(which)
    damage(folder)
    progress = Notes()
    convert_checkpoint(source, folder, RESUME, progress)
    assert len(progress.notes) == len(messages)
    for note, message in zip(progress.notes, messages, strict=True):
        assert note.startswith(message)
    assert digests(folder) == digests(result)


@pytest.mark.parametrize(("damage", "messages"), DAMAGES.values(), ids=DAMAGES.keys())
def test_verify_names_it_and_writes_nothing(source, finished, damage, messages):
    damage(finished)
    before = digests(finished)
    with pytest.raises(ConversionFailed, match="is not what its manifest") as failure:
        verify_checkpoint(source, finished, ConvertOptions())
    for message in messages:
        expected = message.replace("damaged, expected SHA-256", "SHA-256 of the result: expected")
        assert any(p.startswith(expected) for p in failure.value.problems), failure.value.problems
    assert digests(finished) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json: damaged"),
        ("tokenizer.json", "tokenizer.json: damaged"),
        ("model.safetensors.index.json", "model.safetensors.index.json: not what"),
    ],
)
def test_other_files_are_verified_and_repaired(source, result, finished, name, message):
    flip(finished / name)
    with pytest.raises(ConversionFailed, match=message):
        verify_checkpoint(source, finished, ConvertOptions())
    convert_checkpoint(source, finished, RESUME)
    assert digests(finished) == digests(result)


def test_verify_finds_a_lying_manifest(source, finished):
    """A damaged shard with a manifest that was made to agree with it."""
    flip(finished / SHARDS[2])
    manifest = json.loads((finished / "kimi_k3_conversion.json").read_text())
    manifest["shards"][SHARDS[2]]["result"]["sha256"] = digests(finished)[SHARDS[2]]
    (finished / "kimi_k3_conversion.json").write_text(json.dumps(manifest))
    with pytest.raises(ConversionFailed, match=f"{SHARDS[2]}: other bytes than the conversion"):
        verify_checkpoint(source, finished, ConvertOptions())


def test_verify_names_a_source_that_has_changed(source, finished, tmp_path):
    changed = shutil.copytree(source, tmp_path / "changed")
    data = bytearray((changed / SHARDS[3]).read_bytes())
    data[-1] ^= 1
    (changed / SHARDS[3]).write_bytes(data)
    with pytest.raises(ConversionFailed, match=f"{SHARDS[3]}: SHA-256 of the source"):
        verify_checkpoint(changed, finished, ConvertOptions())


def test_a_shard_of_a_changed_source_is_converted_again(source, begun, tmp_path):
    """Same path, same header, other values."""
    copy = shutil.copytree(source, tmp_path / "copy")
    out = tmp_path / "out"
    convert_checkpoint(copy, out)
    before = digests(out)
    (out / "model.safetensors.index.json").unlink()
    target = Destination(out)
    with target.locked():
        plan = make_plan(copy, ConvertOptions())
        target.begin(plan.fingerprint())
        for name, record in target.manifest().shards.items():
            target.write_note(name, ShardNote(record, plan.stamps(name)))
    data = bytearray((copy / SHARDS[3]).read_bytes())
    data[-1] ^= 1
    (copy / SHARDS[3]).write_bytes(data)
    progress = Notes()
    convert_checkpoint(copy, out, RESUME, progress)
    assert progress.notes == [f"{SHARDS[3]}: its source has changed; it is converted again"]
    after = digests(out)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {SHARDS[3], "kimi_k3_conversion.json"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ConvertOptions(resume=True, scale_rule="absmax"), "scale_rule: 'mse' then, 'absmax' now"),
        (ConvertOptions(resume=True, exclude=("*layers.1.*",)), r"exclude: \[\] then"),
    ],
)
@pytest.mark.parametrize("which", ["begun", "finished"])
def test_other_options_are_refused(source, request, which, options, message):
    folder = request.getfixturevalue(which)
    before = digests(folder)
    with pytest.raises(ConversionFailed, match=message):
        convert_checkpoint(source, folder, options)
    assert digests(folder) == before


@pytest.mark.parametrize("which", ["begun", "finished"])
def test_another_source_is_refused(source, request, tmp_path, which):
    folder = request.getfixturevalue(which)
    other = shutil.copytree(source, tmp_path / "other")
    before = digests(folder)
    with pytest.raises(ConversionFailed, match=r"source: '.*' then, '.*other' now"):
        convert_checkpoint(other, folder, RESUME)
    assert digests(folder) == before


@pytest.mark.parametrize(
    ("which", "message"),
    [("begun", "found an unfinished conversion"), ("finished", "found a finished conversion")],
)
def test_without_resume_it_is_refused(source, request, which, message):
    folder = request.getfixturevalue(which)
    before = digests(folder)
    with pytest.raises(ConversionFailed, match=message):
        convert_checkpoint(source, folder)
    assert digests(folder) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"record": {}, "stamps": []}',
        '{"record": {}, "stamps": {"a": null}}',
        "[" * 100_000,
    ],
    ids=["empty", "list", "stamps", "stamp", "deep"],
)
def test_a_damaged_note_of_a_shard_counts_for_nothing(source, begun, result, text):
    for note in (begun / ".kimi_k3_conversion").glob("*.shard.json"):
        note.write_text(text)
    progress = Notes()
    convert_checkpoint(source, begun, RESUME, progress)
    why = "what was noted down of it is damaged; it is converted again"
    assert progress.notes == [f"{name}: {why}" for name in SHARDS[:2]]
    assert digests(begun) == digests(result)


@pytest.mark.parametrize("text", ['{"shards": 5}', "[" * 100_000], ids=["kinds", "deep"])
def test_a_damaged_plan_counts_for_nothing(source, begun, result, text):
    (begun / ".kimi_k3_conversion" / "plan.json").write_text(text)
    convert_checkpoint(source, begun, RESUME)
    assert digests(begun) == digests(result)


def test_a_damaged_account_counts_for_nothing(source, begun, result):
    (begun / ".kimi_k3_conversion" / "plan.json").write_text('{"source": ')
    next((begun / ".kimi_k3_conversion").glob("*.shard.json")).write_text("[1, 2]")
    convert_checkpoint(source, begun, RESUME)
    assert digests(begun) == digests(result)


def test_a_damaged_manifest_is_refused(source, finished):
    (finished / "kimi_k3_conversion.json").write_text("{")
    with pytest.raises(ConversionFailed, match=r"not a conversion's manifest.*new folder"):
        convert_checkpoint(source, finished, RESUME)


def killing(source: Path, folder: Path, expected: Path, *how: str) -> dict:
    (folder / "expected.json").write_text(json.dumps(digests(expected)))
    command = [
        sys.executable,
        "-m",
        KILLING,
        source,
        folder / "out",
        folder / "expected.json",
        *how,
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    return json.loads(process.stdout)


@pytest.mark.slow
def test_killed_at_thirty_random_moments(tmp_path):
    spec = replace(PRESETS["tiny"], layers=4, experts=16, vision=None)
    write_checkpoint(tmp_path / "source", spec, shards=20)
    convert_checkpoint(tmp_path / "source", tmp_path / "whole")
    found = killing(tmp_path / "source", tmp_path, tmp_path / "whole", "moments", "30", "7")
    assert found["killed"] == 30
    # Others die before they have written anything, or after everything.
    assert found["in_the_middle"] >= 20


@pytest.mark.slow
def test_killed_before_every_change_of_the_disk(tmp_path):
    """Every fifth call; each resumed run is compared, and half of them are killed as well."""
    spec = replace(PRESETS["tiny"], layers=2, experts=4, vision=None)
    write_checkpoint(tmp_path / "source", spec, shards=3)
    convert_checkpoint(tmp_path / "source", tmp_path / "whole")
    found = killing(tmp_path / "source", tmp_path, tmp_path / "whole", "calls", "5")
    assert found["calls"] > 60


@pytest.mark.slow
def test_workers_die_with_a_parent_that_is_killed(source, result, tmp_path):
    """And then let go of the lock, so that a run right after is not refused."""
    command = [Path(sys.executable).with_name("kimi-k3"), "convert", source, tmp_path / "out"]
    for delay in (0.5, 1.5, 2.5):
        resume = ["--resume"] if (tmp_path / "out").exists() else []
        process = subprocess.Popen([*command, "--workers=2", *resume])
        time.sleep(delay)
        process.kill()
        process.wait()
    last = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stderr
    assert digests(tmp_path / "out") == digests(result)
