# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Where a conversion may write: refused before anything is written, whoever else is at it."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from kimi_k3.convert import (
    ConversionFailed,
    ConvertOptions,
    convert_checkpoint,
    destination,
    lock,
)
from kimi_k3.convert.destination import Destination
from kimi_k3.convert.manifest import Fingerprint
from tests.kimi_k3.convert.support.files import digests


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
    monkeypatch.setattr(lock, "WAIT", 0.2)
    work = tmp_path / "out" / ".kimi_k3_conversion"
    work.mkdir(parents=True)
    with (work / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
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

    monkeypatch.setattr(destination.Destination, "write_note", fail)
    with pytest.raises(OSError, match="Input/output error"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("to", ["", "deep", ".."], ids=["it", "in it", "around it"])
def test_a_link_in_the_source_does_not_lead_the_destination_into_itself(copy, tmp_path, to, resume):
    out = tmp_path / "around" / "out"
    (out.parent if to == ".." else out).mkdir(parents=True)
    if to == "deep":
        convert_checkpoint(copy, out)
        (out / "deep").mkdir()
    (copy / "link").symlink_to(out / to if to != ".." else out.parent)
    before = digests(tmp_path)
    with pytest.raises(ConversionFailed) as failure:
        convert_checkpoint(copy, out, ConvertOptions(resume=resume or to == "deep"))
    assert failure.value.problems == ["link: a link to the destination, in or around it"]
    assert digests(tmp_path) == before
    assert not (out / ".kimi_k3_conversion").exists()


def test_a_link_in_the_destination_does_not_lead_into_the_source(copy, tmp_path):
    out = tmp_path / "out"
    convert_checkpoint(copy, out)
    shutil.rmtree(out / "modeling")
    (out / "modeling").symlink_to(copy / "modeling")
    before = {file: file.stat().st_ino for file in copy.rglob("*")}, digests(out)
    with pytest.raises(ConversionFailed) as failure:
        convert_checkpoint(copy, out, ConvertOptions(resume=True))
    assert failure.value.problems == ["modeling: no folder, or a link"]
    assert ({file: file.stat().st_ino for file in copy.rglob("*")}, digests(out)) == before
    target = Destination(out)
    with (
        target.locked(),
        pytest.raises(ConversionFailed, match="modeling: no folder, or a link"),
    ):
        target.copy(copy / "config.json", "modeling/new/x.py")
    assert not (copy / "modeling" / "new").exists()


def test_links_in_a_circle_are_told(source, tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    for folder, out in ((tmp_path / "circle", tmp_path / "x"), (source, tmp_path / "circle")):
        with pytest.raises(ConversionFailed, match="circle: its links lead in a circle"):
            convert_checkpoint(folder, out)


def test_a_run_at_work_is_told_from_one_that_was_stopped(source, tmp_path):
    target = Destination(tmp_path / "out")
    with target.locked():
        target.begin(Fingerprint("/s", "mse", [], [], {}))
        with pytest.raises(ConversionFailed, match="another process is converting into this"):
            convert_checkpoint(source, tmp_path / "out")
        target.write("x.shard.json", b"{}", hidden=True)
    with pytest.raises(ConversionFailed, match="found an unfinished conversion"):
        convert_checkpoint(source, tmp_path / "out")


def test_a_refusal_is_not_hidden_by_a_folder_that_another_run_has_filled(source, tmp_path):
    target = Destination(tmp_path / "out")

    def refuse() -> None:
        (tmp_path / "out" / "x").write_text("of another run")
        raise ConversionFailed("the real reason")

    with pytest.raises(ConversionFailed, match="the real reason"), target.locked():
        refuse()
    assert (tmp_path / "out" / "x").exists()


@pytest.mark.parametrize("name", ["plan.json", "lock", "x.partial", ""])
def test_a_folder_or_a_file_in_place_of_ours_is_named(source, result, tmp_path, name):
    out = shutil.copytree(result, tmp_path / "out")
    if name:
        (out / ".kimi_k3_conversion" / name).mkdir(parents=True)
    else:
        (out / ".kimi_k3_conversion").write_text("x")
    if name == "x.partial":
        # Ours, whatever it is: removed with all else that is incomplete.
        convert_checkpoint(source, out, ConvertOptions(resume=True))
        assert digests(out) == digests(result)
        return
    with pytest.raises(ConversionFailed, match=rf"\.kimi_k3_conversion(/{name})?: (exp|cannot)"):
        convert_checkpoint(source, out, ConvertOptions(resume=True))
    assert (out / "model.safetensors.index.json").exists()


def test_errors_name_the_file_that_was_to_be(source, tmp_path, monkeypatch):
    """And not the temporary one, which is gone by then."""
    target = Destination(tmp_path / "out")

    def fail(handle):
        raise OSError(errno.EIO, "Input/output error")

    with target.locked(), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        for work in (
            lambda: target.write("config.json", b"{}"),
            lambda: target.copy(source / "config.json", "config.json"),
        ):
            with pytest.raises(OSError, match="Input/output error") as failure:
                work()
            assert failure.value.filename == str(tmp_path / "out" / "config.json")
