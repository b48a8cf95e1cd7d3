# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The header check: every way in which a folder can fail to be a complete checkpoint."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from k3_checkpoint.check import CheckpointError, check_checkpoint
from k3_checkpoint.headers import HeaderError, read_header
from k3_checkpoint.presets import PRESETS
from k3_checkpoint.shards import INDEX_NAME
from k3_checkpoint.spec import ExpertFormat
from k3_checkpoint.write import write_checkpoint

SPEC = replace(PRESETS["tiny"], layers=2, experts=4, vision=None)
EXPERT = "model.layers.1.block_sparse_moe.experts.2"


@pytest.fixture
def folder(tmp_path) -> Path:
    write_checkpoint(tmp_path / "c", SPEC, shards=3, headers_only=True)
    return tmp_path / "c"


def problems(folder: Path, **kwargs) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder, SPEC, **kwargs)
    return [str(problem) for problem in caught.value.problems]


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def edit_header(file: Path, change) -> None:
    """Rewrite a header; the data stays a hole of the size that the header then names."""
    with file.open("rb") as shard:
        length = struct.unpack("<Q", shard.read(8))[0]
        entries = json.loads(shard.read(length))
    change(entries)
    text = json.dumps(entries).encode()
    end = max(e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__")
    with file.open("wb") as shard:
        shard.write(struct.pack("<Q", len(text)) + text)
        shard.truncate(8 + len(text) + end)


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][tensor]


def test_a_complete_checkpoint_passes_with_and_without_index(folder):
    check_checkpoint(folder, SPEC)
    (folder / INDEX_NAME).unlink()
    check_checkpoint(folder, SPEC)


def test_all_problems_come_at_once(folder):
    (folder / "model-00001-of-000003.safetensors").unlink()
    file = folder / "model-00003-of-000003.safetensors"
    with file.open("ab") as shard:
        shard.write(b"more")
    first, second = problems(folder)
    assert first.startswith("model-00001-of-000003.safetensors: not there")
    assert second.startswith("model-00003-of-000003.safetensors: expected")
    assert second.endswith("followed by foreign bytes")


def test_message_counts_what_it_does_not_show(folder):
    other = replace(SPEC, layers=9)
    with pytest.raises(CheckpointError, match=r"and .* more") as caught:
        check_checkpoint(folder, other)
    assert f"{len(caught.value.problems)} problems" in str(caught.value)
    assert str(folder) in str(caught.value)


def test_empty_folder(tmp_path):
    assert problems(tmp_path) == ["no model.safetensors.index.json and no *.safetensors file"]


def test_index_that_is_no_index(folder):
    (folder / INDEX_NAME).write_text("{")
    assert problems(folder)[0].startswith(f"{INDEX_NAME}: ")
    (folder / INDEX_NAME).write_text("{}")
    (problem,) = problems(folder)
    assert problem == (
        f"{INDEX_NAME}: no index of safetensors shards: "
        "expected a weight_map of tensors to shards, found None"
    )


def test_index_and_shards_that_disagree(folder):
    name = "model.norm.weight"
    actual = shard_of(folder, name).name
    edit_index(folder, lambda m: m.update({name: "model-00001-of-000003.safetensors"}))
    assert problems(folder) == [
        f"{name}: the index says model-00001-of-000003.safetensors, it is in {actual}"
    ]


def test_tensor_in_two_shards(folder):
    entry = {"dtype": "BF16", "shape": [256], "data_offsets": [0, 512]}

    def add(entries):
        entry["data_offsets"] = [
            end := max(e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"),
            end + 512,
        ]
        entries["model.norm.weight"] = entry

    edit_header(folder / "model-00001-of-000003.safetensors", add)
    (problem,) = problems(folder)
    assert problem == (
        "model.norm.weight: in model-00001-of-000003.safetensors and again in "
        "model-00003-of-000003.safetensors"
    )


def test_shapes_are_compared(folder):
    name = f"{EXPERT}.w2.weight_packed"
    edit_header(shard_of(folder, name), lambda e: e[name].update(shape=[32, 128]))
    assert problems(folder) == [f"{name}: expected U8 [128, 32], found U8 [32, 128]"]


def test_float_dtypes_are_interchangeable_but_not_integers(folder):
    name = "model.layers.0.self_attn.o_norm.weight"
    file = shard_of(folder, name)

    def as_dtype(dtype):
        return lambda e: e[name].update(dtype=dtype)

    edit_header(file, as_dtype("I32"))
    assert problems(folder) == [f"{name}: expected BF16, F16 or F32 [64], found I32 [64]"]
    edit_header(file, as_dtype("F32"))
    check_checkpoint(folder, SPEC)


def test_a_log_may_be_stored_in_four_dimensions(folder):
    name = "model.layers.0.self_attn.A_log"
    edit_header(shard_of(folder, name), lambda e: e[name].update(shape=[1, 1, 128, 1]))
    check_checkpoint(folder, SPEC)


def test_experts_of_another_format_are_not_judged(folder):
    other = replace(SPEC, expert_format=ExpertFormat.BF16)
    with pytest.raises(CheckpointError, match=r"experts.2: w1.weight, w2.weight, w3.weight in no"):
        check_checkpoint(folder, other)
    check_checkpoint(folder, other, experts=False)


def header(text: str, encoding: str = "utf-8") -> bytes:
    """A shard of a header and no more."""
    data = text.encode(encoding)
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes do not hold a safetensors header"),
        (b"1234", "4 bytes do not hold"),
        (struct.pack("<Q", 1 << 60) + b"{}", "do not hold a safetensors header"),
        (struct.pack("<Q", 2) + b"[]", "no safetensors header"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "no safetensors header"),
        (
            struct.pack("<Q", 57)
            + b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}    '
            + b"12345678",
            "gap or overlap",
        ),
        (
            struct.pack("<Q", 57)
            + b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,4]}}    '
            + b"1234",
            "4 bytes are not U8",
        ),
        (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "named twice: a"),
        (header('{"a":{"dtype":"U8","shape":[1]}}'), "a: expected a dtype, a shape and data_of"),
        (header('{"a":{"dtype":5,"shape":[],"data_offsets":[0,0]}}'), "a: expected a dtype"),
        (header('{"a":{"dtype":"U8","shape":"ab","data_offsets":[0,0]}}'), "a: expected a dtype"),
        (header('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}}'), "a: expected two data_of"),
        (header('{"":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}'), "'': expected whole"),
        (header('{"a":[]}'), r"a: expected an object, found \[\]"),
        (header('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "no Unicode text"),
        (header('{"a":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}'), "data: a takes 4 to 5"),
        (header("{}", "utf-16"), "no safetensors header: 'utf-8' codec"),
    ],
    ids=[
        *("empty", "short", "huge", "list", "no entry", "gap", "size", "twice"),
        *("no offsets", "dtype", "shape", "one offset", "no name", "no object"),
        *("surrogate", "place", "utf-16"),
    ],
)
def test_files_that_are_no_shards(tmp_path, content, message):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(HeaderError, match=message):
        read_header(tmp_path / "x.safetensors")
