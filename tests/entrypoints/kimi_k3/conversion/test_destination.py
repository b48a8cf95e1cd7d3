# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Where a conversion may write: refused before anything is written, whoever else is at it."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
from files import digests

from vllm.entrypoints.kimi_k3.conversion import (
    ConversionFailed,
    ConvertOptions,
    convert_checkpoint,
    destination,
)
from vllm.entrypoints.kimi_k3.conversion.destination import Destination


@pytest.fixture
def copy(source, tmp_path) -> Path:
    return shutil.copytree(source, tmp_path / "copy")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda copy: copy, "one that is the source"),
        (lambda copy: copy / "." / ".." / copy.name, "one that is the source"),
        (lambda copy: copy / "out" / "deep", "inside the other"),
        (lambda copy: copy.parent, "inside the other"),
    ],
    ids=["same", "same in other words", "inside", "around"],
)
def test_source_and_destination_lie_apart(copy, place, message, resume):
    before = digests(copy)
    with pytest.raises(ConversionFailed, match=message):
        convert_checkpoint(copy, place(copy), ConvertOptions(resume=resume))
    assert digests(copy) == before


def test_links_do_not_hide_that(copy, tmp_path):
    before = digests(copy)
    (tmp_path / "link").symlink_to(copy)
    for out in (tmp_path / "link", tmp_path / "link" / "out"):
        for folder in (copy, tmp_path / "link"):
            with pytest.raises(ConversionFailed, match="expected a destination apart"):
                convert_checkpoint(folder, out)
    assert digests(copy) == before


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_others_are_not_touched(source, tmp_path, resume):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(ConversionFailed, match="found files that no conversion of this tool wrote"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(resume=resume))
    assert digests(tmp_path / "out").keys() == {"thesis.txt"}


def test_a_file_is_no_folder(source, tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConversionFailed, match="expected a folder, found a file"):
        convert_checkpoint(source, tmp_path / "out")


def test_an_empty_folder_will_do(source, result, tmp_path):
    (tmp_path / "out").mkdir()
    convert_checkpoint(source, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(result)


@pytest.mark.parametrize("resume", [False, True])
def test_a_hidden_folder_that_leads_elsewhere_is_left_alone(source, tmp_path, resume):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("x.partial", "y.shard.json", "plan.json"):
        (elsewhere / name).write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".kimi_k3_conversion").symlink_to(elsewhere)
    with pytest.raises(ConversionFailed, match="found files that no conversion"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(resume=resume))
    assert len(list(elsewhere.iterdir())) == 3


def test_a_second_process_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(destination, "_LOCK_WAIT", 0.2)
    work = tmp_path / "out" / ".kimi_k3_conversion"
    work.mkdir(parents=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConversionFailed, match="another process is converting"):
            convert_checkpoint(source, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").rglob("*")] == [work.name, "lock"]
    convert_checkpoint(source, tmp_path / "out")
    assert not work.exists()


def test_one_that_waited_for_another_finds_it_finished(source, result, tmp_path):
    """Both saw an empty folder; the second gets the lock when the first is done."""
    target = Destination(tmp_path / "out")
    target.check_may_begin(resume=False)
    convert_checkpoint(source, tmp_path / "out")
    with target.locked(), pytest.raises(ConversionFailed, match="found a finished conversion"):
        target.check_may_begin(resume=False)
    assert digests(tmp_path / "out") == digests(result)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_target_that_cannot_be_written(source, tmp_path, monkeypatch, error):
    def refuse(self, *args, **kwargs):
        raise OSError(error, os.strerror(error), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConversionFailed, match=f"cannot be written: {os.strerror(error)}"):
        convert_checkpoint(source, tmp_path / "out")


def test_nothing_is_left_of_a_run_that_fails_at_once(source, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error", "x")

    monkeypatch.setattr(destination.Destination, "remember", fail)
    with pytest.raises(OSError, match="Input/output error"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
