# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What is wrong with a source is told before anything is written: everything, and by name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kimi_k3.convert import ConversionFailed, convert_checkpoint
from kimi_k3.convert.source import read_source
from tests.kimi_k3.convert.support.files import (
    INDEX,
    mxfp4,
    write_checkpoint,
    write_index,
    write_raw,
    write_shard,
)

A, B = "a.safetensors", "b.safetensors"


def shards() -> dict[str, dict[str, torch.Tensor]]:
    return {
        A: {**mxfp4("experts.0.w1", 4, 64), "norm": torch.ones(3)},
        B: {**mxfp4("experts.1.w1", 4, 64), "head": torch.ones(3)},
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "source", shards())


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    tensors = shards()
    change(tensors)
    for name, content in tensors.items():
        write_shard(folder / name, content)
    write_index(folder, tensors)


def reindex(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def set_tensor(shard: str, name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda found: found[shard].update({name: tensor}))


def drop(shard: str, name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda found: found[shard].pop(name))


def raw(header: bytes, data: bytes = b"") -> Callable[[Path], None]:
    return lambda folder: write_raw(folder / A, header, data)


def truncate(folder: Path) -> None:
    (folder / A).write_bytes((folder / A).read_bytes()[:-1])


def swap(folder: Path) -> None:
    one, two = (folder / A).read_bytes(), (folder / B).read_bytes()
    (folder / A).write_bytes(two)
    (folder / B).write_bytes(one)


BYTE = torch.zeros(4, 2, dtype=torch.uint8)
CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, f"{A}: expected .* bytes by its header, found .*: truncated"),
    "longer": (lambda f: (f / A).open("ab").write(b"x"), f"{A}: .*followed by foreign bytes"),
    "empty": (lambda f: (f / A).write_bytes(b""), f"{A}: 0 bytes do not hold a safetensors header"),
    "missing": (lambda f: (f / A).unlink(), f"{A}: not there; the index names it for 3 tensors"),
    "broken link": (
        lambda f: ((f / A).unlink(), (f / A).symlink_to("nowhere")),
        f"{A}: a link to a file that is not there",
    ),
    "a folder": (lambda f: ((f / A).unlink(), (f / A).mkdir()), f"{A}: no regular file"),
    "a pipe": (lambda f: ((f / A).unlink(), os.mkfifo(f / A)), f"{A}: no regular file"),
    "a device": (
        lambda f: ((f / A).unlink(), (f / A).symlink_to("/dev/zero")),
        f"{A}: no regular file",
    ),
    "config a pipe": (
        lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")),
        "config.json: no regular file",
    ),
    "other a pipe": (lambda f: os.mkfifo(f / "x.json"), "x.json: no regular file"),
    "config nested": (
        lambda f: (f / "config.json").write_text('{"a":' * 900 + "1" + "}" * 900),
        "nested too deeply|no quantization_config",
    ),
    "nameless": (
        lambda f: rewrite(f, lambda s: s[A].update(mxfp4("", 4, 64))),
        r"\.weight_packed: unexpected|weight_packed: expected the name of a module",
    ),
    "bare": (
        lambda f: rewrite(
            f, lambda s: s[A].update({k[1:]: v for k, v in mxfp4("", 4, 64).items()})
        ),
        "weight_packed: expected the name of a module before it",
    ),
    "rows without end": (
        lambda f: (
            raw(
                b'{"x.weight_packed":{"dtype":"U8","shape":[4611686018427387904,0],'
                b'"data_offsets":[0,0]},"x.weight_scale":{"dtype":"U8",'
                b'"shape":[4611686018427387904,0],"data_offsets":[0,0]}}'
            )(f),
            (f / INDEX).unlink(),
        ),
        r"x.weight_packed: expected U8 \[N, K/2\]",
    ),
    "swapped": (swap, f"experts.0.w1.weight_packed: the index says {A}, it is in {B}"),
    "no shards": (
        lambda f: [file.unlink() for file in (f / A, f / B, f / INDEX)],
        r"no model.safetensors.index.json and no \*.safetensors file",
    ),
    "unknown shard": (
        lambda f: write_shard(f / "c.safetensors", {"x": torch.ones(1)}),
        "c.safetensors: a shard that the index does not name",
    ),
    "in two shards": (
        lambda f: write_shard(f / B, shards()[B] | {"norm": torch.ones(3)}),
        f"norm: in {A} and again in {B}",
    ),
    "not in a shard": (
        lambda f: reindex(f, lambda m: m.update(ghost=A)),
        f"ghost: the index says {A}, it is in no shard",
    ),
    "not in the index": (
        lambda f: reindex(f, lambda m: m.pop("norm")),
        f"norm: in {A}, and not in the index",
    ),
    "index is no JSON": (lambda f: (f / INDEX).write_text("{"), f"{INDEX}: no index"),
    "index names twice": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
        f"{INDEX}: no index.*named twice: a",
    ),
    "index leads away": (
        lambda f: reindex(f, lambda m: m.update(norm="../x.safetensors")),
        "expected names of files beside it",
    ),
    "index of numbers": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 3}}'), "found 3"),
    "header no JSON": (raw(b"{nonsense"), f"{A}: its header is no safetensors header"),
    "header nested": (raw(b'{"a":' + b"[" * 100000), f"{A}: its header is no safetensors header"),
    "header a list": (raw(b"[]"), f"{A}: its header is no safetensors header"),
    "header twice": (
        raw(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{}}', b"1"),
        "named twice: x",
    ),
    "header too long": (
        lambda f: (f / A).write_bytes(b"\xff" * 16),
        "16 bytes do not hold a safetensors header",
    ),
    "header negative": (
        raw(b'{"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', b"1"),
        "x: expected whole numbers of 0 or more",
    ),
    "header true": (
        raw(b'{"x":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"1"),
        "x: expected whole numbers of 0 or more",
    ),
    "header gap": (
        raw(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"12"),
        "leave a gap or overlap at byte 0",
    ),
    "header size": (
        raw(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
        "4 bytes are not F32",
    ),
    "no scale": (
        drop(A, "experts.0.w1.weight_scale"),
        "weight_packed: there without its weight_scale",
    ),
    "no codes": (
        drop(A, "experts.0.w1.weight_packed"),
        "experts.0.w1.weight_scale: there without its weight_packed",
    ),
    "scale shape": (
        set_tensor(A, "experts.0.w1.weight_scale", BYTE[:, :1]),
        r"expected U8 or F8_E8M0 \[4, 2\], found U8 \[4, 1\]",
    ),
    "scale dtype": (
        set_tensor(A, "experts.0.w1.weight_scale", BYTE.bfloat16()),
        r"expected U8 or F8_E8M0 \[4, 2\], found BF16 \[4, 2\]",
    ),
    "codes dtype": (
        set_tensor(A, "experts.0.w1.weight_packed", torch.zeros(4, 32)),
        r"expected U8 \[N, K/2\] .* found F32 \[4, 32\]",
    ),
    "codes shape": (
        set_tensor(A, "experts.0.w1.weight_packed", torch.zeros(4, 33, dtype=torch.uint8)),
        r"K a multiple of 32, found U8 \[4, 33\]",
    ),
    "codes fused": (
        set_tensor(A, "experts.0.w1.weight_packed", torch.zeros(2, 4, 32, dtype=torch.uint8)),
        r"expected U8 \[N, K/2\] .* found U8 \[2, 4, 32\]",
    ),
    "int4 already": (
        set_tensor(A, "experts.0.w1.weight_packed", torch.zeros(4, 8, dtype=torch.int32)),
        "found I32, which is int4 already",
    ),
    "zero points": (
        set_tensor(A, "experts.0.w1.weight_zero_point", BYTE),
        "weight_zero_point: unexpected beside weight_packed",
    ),
    "global scale": (
        set_tensor(A, "experts.0.w1.weight_global_scale", torch.ones(1)),
        "weight_global_scale: unexpected beside weight_packed",
    ),
    "gpt-oss": (
        set_tensor(A, "m.experts.gate_up_proj_blocks", BYTE),
        "m.experts.gate_up_proj_blocks and 0 more: fused experts in the form of gpt-oss",
    ),
    "nothing to do": (
        lambda f: rewrite(f, lambda s: [s[n].pop(k) for n in s for k in list(s[n])[:2]]),
        "no weight_packed in any shard",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: not there"),
    "config no JSON": (lambda f: (f / "config.json").write_text("?"), "config.json: expected JSON"),
    "config a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "expected a JSON object, found list",
    ),
    "not quantized": (
        lambda f: (f / "config.json").write_text("{}"),
        "config.json: no quantization_config: expected compressed-tensors",
    ),
    "another method": (
        lambda f: edit_config(f, lambda q: q.update(quant_method="gptq")),
        "quant_method: expected compressed-tensors .* found 'gptq'",
    ),
    "another format": (
        lambda f: edit_config(f, lambda q: q.update(format="nvfp4-pack-quantized")),
        "format: expected mxfp4-pack-quantized, found 'nvfp4-pack-quantized'",
    ),
    "int4 format": (
        lambda f: edit_config(f, lambda q: q.update(format="pack-quantized")),
        "the checkpoint holds integers already",
    ),
    "group size": (
        lambda f: edit_config(
            f, lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=16)
        ),
        "group_0.weights.group_size: expected 32, found 16",
    ),
    "no groups": (
        lambda f: edit_config(f, lambda q: q.update(config_groups={})),
        "no group in mxfp4-pack-quantized",
    ),
    "groups a list": (
        lambda f: edit_config(f, lambda q: q.update(config_groups=[1])),
        "expected groups by name",
    ),
    "loop of links": (
        lambda f: ((f / "sub").mkdir(), (f / "sub" / "up").symlink_to("..")),
        "sub/up: a link to a folder that it lies in",
    ),
    "link to nothing": (lambda f: (f / "x.json").symlink_to("gone"), "x.json: a link to nothing"),
}


@pytest.mark.parametrize(("damage", "message"), CASES.values(), ids=CASES.keys())
def test_it_is_named_and_nothing_is_written(folder, tmp_path, damage, message):
    damage(folder)
    with pytest.raises(ConversionFailed, match=message):
        convert_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_problems_are_told_at_once(folder):
    rewrite(folder, lambda found: found[B].update({"experts.1.w1.weight_scale": BYTE[:, :1]}))
    for change in (
        lambda q: q.update(format="fp8"),
        lambda q: q.update(config_groups={}),
    ):
        edit_config(folder, change)
    truncate(folder)
    (folder / "x").symlink_to("gone")
    with pytest.raises(ConversionFailed, match="3 problems") as failure:
        read_source(folder)
    assert [p.split(":")[0] for p in failure.value.problems] == ["config.json", A, "x"]


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ConversionFailed, match="expected a checkpoint's folder, found none"):
        read_source(tmp_path / "nowhere")


def test_a_result_is_no_source(result, tmp_path):
    with pytest.raises(ConversionFailed, match="is converted already"):
        read_source(result)
    copy = tmp_path / "copy"
    shutil.copytree(result, copy)
    (copy / "kimi_k3_conversion.json").unlink()
    with pytest.raises(ConversionFailed, match="integers already") as failure:
        read_source(copy)
    assert any("int4 already" in problem for problem in failure.value.problems)


def test_what_hub_tools_leave_behind_is_not_copied(folder, tmp_path):
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "x.lock").touch()
    (folder / ".gitattributes").write_text("*.bin filter=lfs")
    assert read_source(folder).others == (".gitattributes",)


def test_other_modules_with_scales_are_left_alone(folder):
    """FP8 layers of the same checkpoint have a weight and a weight_scale."""
    fp8 = {"linear.weight": torch.ones(4, 4), "linear.weight_scale": torch.ones(4, 1)}
    rewrite(folder, lambda found: found[A].update(fp8))
    assert read_source(folder).modules.keys() == {"experts.0.w1", "experts.1.w1"}
