# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Opening a checkpoint: what is in it, and everything that is wrong with it at once, by kind."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3_checkpoint import Checkpoint, Kind
from k3_checkpoint.formats import Format
from k3_checkpoint.headers import Entry, read_full_header
from k3_checkpoint.presets import PRESETS
from k3_checkpoint.shards import INDEX_NAME
from k3_checkpoint.tensors import checkpoint_tensors
from k3_checkpoint.write import write_checkpoint

SPEC = replace(PRESETS["tiny"], layers=3, experts=4, vision=None)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path) -> Path:
    write_checkpoint(tmp_path / "k3", SPEC, shards=3, headers_only=True)
    return tmp_path / "k3"


def kinds(folder: Path) -> list[tuple[Kind, str]]:
    return [(problem.kind, problem.subject) for problem in Checkpoint.open(folder).problems]


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_what_is_in_a_checkpoint(folder):
    found = Checkpoint.open(str(folder))
    assert found.problems == ()
    assert found.config == SPEC.config()
    assert found.indexed
    assert found.metadata == json.loads((folder / INDEX_NAME).read_text())["metadata"]
    assert found.owner == json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    assert found.files == sorted(folder.glob("*.safetensors"))
    assert found.nbytes == sum(file.stat().st_size for file in found.files)
    for tensor in checkpoint_tensors(SPEC):
        assert found.entry(tensor.name) == Entry(tensor.dtype, tensor.shape)
    assert found.entry("ghost") is None
    assert len(set(found.packed_modules())) == 2 * 4 * 3
    assert found.declared is Format.MXFP4
    assert found.stored() == {Format.MXFP4: 2 * 4 * 3}
    (folder / INDEX_NAME).unlink()
    assert replace(found, indexed=False, metadata={}) == Checkpoint.open(folder)


def test_spans_are_where_the_bytes_are(folder):
    file = next(folder.glob("*.safetensors"))
    header = read_full_header(file)
    text = file.open("rb").read(header.first)[8:]
    entries = json.loads(text)
    assert header.metadata == entries.pop("__metadata__")
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        assert header.spans[name] == (header.first + start, header.first + stop)


def test_everything_is_listed_at_once(folder):
    first, second, third = Checkpoint.open(folder).shards
    (folder / "config.json").write_text("[]")
    (folder / "other.safetensors").write_bytes(b"")
    (folder / first).unlink()
    (folder / second).write_bytes(b"")
    edit_index(folder, lambda index: index["weight_map"].update(ghost=third))
    edit_index(folder, lambda index: index["weight_map"].pop("lm_head.weight"))
    assert kinds(folder) == [
        (Kind.CONFIG, "config.json"),
        (Kind.UNNAMED, "other.safetensors"),
        (Kind.MISSING, first),
        (Kind.SHARD, second),
        (Kind.MISPLACED, "ghost"),
        (Kind.UNINDEXED, "lm_head.weight"),
    ]


def test_folders_that_are_no_checkpoints(tmp_path):
    assert kinds(tmp_path) == [(Kind.CONFIG, "config.json"), (Kind.FOLDER, "")]
    assert kinds(tmp_path / "nowhere") == [(Kind.FOLDER, "")]
    (problem,) = Checkpoint.open("neither a folder nor an id").problems
    assert "or a hub id such as" in str(problem)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_an_index_of_names_that_no_file_can_have(folder, name):
    edit_index(folder, lambda index: index["weight_map"].update(ghost=f"{name}.safetensors"))
    (problem,) = Checkpoint.open(folder).problems
    assert problem.kind in (Kind.SHARD, Kind.MISSING)
    assert str(problem).isprintable()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map":[]}', '{"weight_map":{"a":[]}}', "\xff", "[" * 10**5]
)
def test_an_index_that_is_none(folder, content):
    (folder / INDEX_NAME).write_bytes(content.encode("latin-1"))
    assert kinds(folder) == [(Kind.INDEX, INDEX_NAME)]


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map":{"a":"x.safetensors"},"weight_map":{"b":"x.safetensors"}}',
        '{"weight_map":{},"weight_map":{"metadata":"x.safetensors"}}',
        '{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}',
        '{"weight_map":{"a":"x.safetensors","\\u0061":"x.safetensors"}}',
        '{"metadata":{"b":1,"b":2},"weight_map":{"a":"x.safetensors"}}',
        '{"metadata":{},"metadata":{"b":1},"weight_map":{"a":"x.safetensors"}}',
        '{"c":{"d":1,"d":2},"weight_map":{"a":"x.safetensors"}}',
    ],
)
def test_an_index_that_names_anything_twice(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    (problem,) = Checkpoint.open(tmp_path).of_kind(Kind.INDEX)
    assert "named twice" in problem.text


@pytest.mark.parametrize(
    "entries",
    [
        '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"dtype":"U8"}',
        '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}',
        '"a":{},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        '"__metadata__":{},"__metadata__":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        '"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":{"x":1,"x":2}}',
    ],
)
def test_a_header_that_names_anything_twice(tmp_path, entries):
    text = f"{{{entries}}}".encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (problem,) = Checkpoint.open(tmp_path).of_kind(Kind.SHARD)
    assert "named twice" in problem.text


@pytest.mark.parametrize(
    "entries",
    [
        '"a\\u0062":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        '"ab" : {"data_offsets":[0,0], "more": "x", "dtype":"U8","shape":[0]}',
        '"ab":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"__metadata__":{"format":"pt"}',
        '"__metadata__": {"x": "{}"}, "ab":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        '"__metadata__":null,"ab":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    ],
)
def test_headers_as_no_writer_writes_them(tmp_path, entries):
    text = f"{{{entries}}}   ".encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert read_full_header(tmp_path / "x.safetensors").entries == {"ab": Entry("U8", (0,))}


def test_neither_torch_nor_vllm_is_imported(folder):
    code = (
        "import sys; from k3_checkpoint import Checkpoint, check, formats, presets, tensors; "
        "c = Checkpoint.open(sys.argv[1]); assert c.owner and not c.problems; "
        "print(sorted({'torch', 'vllm', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"


@pytest.mark.slow
def test_kimi_k3_is_opened_and_checked_in_3_seconds_and_400_mib():
    """The bar is CPU seconds of one process, so that a busy machine does not decide it."""
    script = ROOT / "benchmarks" / "open_checkpoint.py"
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "96 shards, 497,220 tensors" in found.stdout
