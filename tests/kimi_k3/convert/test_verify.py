# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A manifest and files beside the shards that are not what the conversion wrote: `--verify` names
each, and `--resume` takes none of it over."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_k3.convert import (
    MANIFEST_NAME,
    ConversionFailed,
    ConvertOptions,
    convert_checkpoint,
)
from kimi_k3.convert.verify import verify_checkpoint
from tests.kimi_k3.convert.support.files import digests
from tests.kimi_k3.convert.support.notes import Notes

RESUME = ConvertOptions(resume=True)
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{i:05d}-of-000004.safetensors" for i in range(1, 5)]
ONE = SHARDS[2]


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    change(manifest)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def problems_of(source: Path, folder: Path) -> list[str]:
    """What `--verify` says, which writes nothing."""
    before = digests(folder)
    with pytest.raises(ConversionFailed) as failure:
        verify_checkpoint(source, folder, ConvertOptions())
    assert digests(folder) == before
    return failure.value.problems


def agreed(folder: Path) -> None:
    """A damaged tokenizer, and a manifest that was made to agree with it."""
    flip(folder / "tokenizer.json", 5)
    sha = digests(folder)["tokenizer.json"]
    edit(folder, lambda m: m["files"]["tokenizer.json"].update(sha256=sha))


def dropped(folder: Path) -> None:
    flip(folder / "tokenizer.json", 5)
    edit(folder, lambda m: m["files"].pop("tokenizer.json"))


def gone(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    edit(folder, lambda m: m["files"].pop("tokenizer.json"))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (agreed, ["the manifest has another size or SHA-256 of it", "damaged, expected SHA-256"]),
        (dropped, ["in the source, and not in the manifest", "damaged, expected SHA-256"]),
        (gone, ["in the source, and not in the manifest", "not there"]),
    ],
    ids=["agreed", "dropped", "gone"],
)
def test_other_files_are_held_to_the_source(source, result, finished, damage, messages):
    damage(finished)
    found = problems_of(source, finished)
    assert len(found) == len(messages)
    for problem, message in zip(found, messages, strict=True):
        assert problem.startswith(f"tokenizer.json: {message}")
    convert_checkpoint(source, finished, RESUME)
    assert digests(finished) == digests(result)


def test_files_that_no_conversion_wrote_are_named(source, result, finished):
    strange = ["chat.py", "modeling/more", "pytorch_model.bin", "zz.safetensors"]
    for name in strange:
        (finished / name).write_text("x")
    (finished / "empty").mkdir()
    (finished / "modeling" / "link").symlink_to(source)
    (finished / ".cache").mkdir()
    (finished / ".cache" / "x").write_text("of a tool that fetches")
    expected = sorted([*strange, "empty", "modeling/link"])
    found = problems_of(source, finished)
    assert sorted(found) == [f"{name}: not of this conversion; remove it" for name in expected]
    progress = Notes()
    convert_checkpoint(source, finished, RESUME, progress)
    left = [f"{name}: not of this conversion; it is left as it is" for name in expected]
    assert sorted(progress.notes) == left
    assert sorted(problems_of(source, finished)) == sorted(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["source"].update(bytes=1), "source.bytes: expected "),
        (lambda r: r["source"].update(sha256="0" * 64), "SHA-256 of the source: expected 0000"),
        (lambda r: r.update(modules=["a", *r["modules"][1:]]), "modules: expected "),
        (lambda r: r["modules"].reverse(), "modules: expected "),
        (lambda r: r["result"].update(bytes=1), "result.bytes: expected "),
        (lambda r: r["result"].update(sha256="0" * 64), "SHA-256 of the result: expected 0000"),
    ],
    ids=["source size", "source", "module", "order", "result size", "result"],
)
def test_every_field_of_a_shard_is_proven_or_made_anew(source, result, finished, change, message):
    edit(finished, lambda m: change(m["shards"][ONE]))
    found = problems_of(source, finished)
    assert any(problem.startswith(f"{ONE}: {message}") for problem in found), found
    progress = Notes()
    convert_checkpoint(source, finished, RESUME, progress)
    assert [note.partition(":")[0] for note in progress.notes] == [ONE]
    assert progress.shards == 1
    assert digests(finished) == digests(result)


def test_where_the_source_lies_does_not_matter_but_is_told(source, finished, tmp_path):
    moved = shutil.copytree(source, tmp_path / "moved")
    progress = Notes()
    verify_checkpoint(moved, finished, ConvertOptions(), progress)
    [note] = progress.notes
    assert note.startswith(f"the manifest names {source} as its source; this proof is against")
    edit(finished, lambda m: m.update(source=str(finished)))
    [problem] = problems_of(source, finished)
    assert problem.startswith("source: the manifest names the destination itself")


def test_a_repaired_result_is_of_one_state_of_the_source(source, tmp_path):
    """One shard is missing in the result; the source of another has changed under its header."""
    copy = shutil.copytree(source, tmp_path / "copy")
    out = tmp_path / "out"
    convert_checkpoint(copy, out)
    flip(copy / SHARDS[1], -1)
    flip(copy / SHARDS[3], -1)
    (out / SHARDS[3]).unlink()
    progress = Notes()
    convert_checkpoint(copy, out, ConvertOptions(resume=True, verify=True), progress)
    changed, missing = sorted(progress.notes)
    assert changed.startswith(
        f"{SHARDS[1]}: {SHARDS[1]} of the source has not the manifest's SHA-256; it is converted"
    )
    assert missing == f"{SHARDS[3]}: not there; it is converted again"


def nested(depth: int) -> str:
    return '{"version": 1, "tools": ' + "[" * depth + "]" * depth + "}"


WRONG: dict[str, tuple[Callable[[dict], object], str]] = {
    "bytes": (lambda m: m["shards"][ONE]["result"].update(bytes="12"), f"shards.{ONE}.result.by"),
    "true": (lambda m: m["shards"][ONE]["source"].update(bytes=True), f"shards.{ONE}.source.by"),
    "sha": (lambda m: m["shards"][ONE]["result"].update(sha256=None), f"shards.{ONE}.result.sha"),
    "header": (lambda m: m["shards"][ONE].update(source_header=5), f"shards.{ONE}.source_header"),
    "modules": (lambda m: m["shards"][ONE].update(modules=[[1]]), f"shards.{ONE}.modules"),
    "more": (lambda m: m["shards"][ONE].update(foo=1), f"shards.{ONE}: .*unknown field `foo`"),
    "name": (lambda m: m["shards"].update({"../x.safetensors": 1}), "shards: expected a name"),
    "rule": (lambda m: m.update(scale_rule="foo"), "scale_rule: expected one of"),
    "include": (lambda m: m.update(include=[1]), r"include\[0\]: expected `str`, found `int`"),
    "exclude": (lambda m: m.update(exclude="abc"), "exclude: expected `array`, found `str`"),
    "source": (lambda m: m.update(source=3), "source: expected `str`, found `int`"),
    "path": (lambda m: m.update(source="/a\0b"), "source: expected an absolute path"),
    "relative": (lambda m: m.update(source="."), "source: expected an absolute path"),
    "tools": (lambda m: m.update(tools={"torch": 1}), "tools.torch: expected `str`, found `int`"),
    "files": (
        lambda m: m["files"].update({"config.json": None}),
        "files.config.json: expected `obj",
    ),
    "away": (lambda m: m["files"].update({"../../x": {}}), "files: expected a name of a file"),
    "nul": (lambda m: m["files"].update({"a\0b": {}}), "files: expected a name of a file"),
    "version": (lambda m: m.update(version=2), "version: expected 1, found 2"),
    "missing": (lambda m: m.pop("tools"), "the whole: .*missing required field `tools`"),
}


@pytest.mark.parametrize("do", ["verify", "resume"])
@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_manifest_of_wrong_kinds_is_refused_by_field(source, finished, change, message, do):
    edit(finished, change)
    refused(source, finished, do, f"{MANIFEST_NAME}: not a conversion's manifest: {message}")


@pytest.mark.parametrize("do", ["verify", "resume"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[1]", "the whole: expected `object`, found `array`"),
        (nested(100_000), "nested too deeply"),
        ('{"version": 1, "version": 1}', "named twice: version"),
    ],
    ids=["empty", "list", "deep", "twice"],
)
def test_a_text_that_is_no_manifest_is_refused(source, finished, text, message, do):
    (finished / MANIFEST_NAME).write_text(text)
    refused(source, finished, do, f"not a conversion's manifest: {message}")


def refused(source: Path, folder: Path, do: str, message: str) -> None:
    """And nothing is changed: the index above all."""
    before = digests(folder)
    work, options = {
        "verify": (verify_checkpoint, ConvertOptions()),
        "resume": (convert_checkpoint, RESUME),
    }[do]
    with pytest.raises(ConversionFailed, match=message):
        work(source, folder, options)
    assert digests(folder) == before
    assert not (folder / ".kimi_k3_conversion").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", [MANIFEST_NAME, INDEX, "config.json", ONE, "tokenizer.json"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused(source, finished, name, make):
    (finished / name).unlink()
    make(finished / name)
    refused(source, finished, "resume", f"{name}: expected a file or nothing, found")
    with pytest.raises(ConversionFailed, match=f"{name}: .*(no|expected a) regular file"):
        verify_checkpoint(source, finished, ConvertOptions())
