# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A converted checkpoint against its source: every tensor, every file, and the library's view."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

from kimi_k3.convert import (
    ConversionFailed,
    ConvertOptions,
    Manifest,
    convert_checkpoint,
    destination,
    shard,
)
from kimi_k3.convert.verify import verify_checkpoint
from mxfp4_int4 import (
    ConvertedExperts,
    convert_experts,
    dequantize,
    native_library,
)
from tests.kimi_k3.convert.support.files import (
    all_tensors,
    digests,
    mxfp4,
    write_checkpoint,
    write_shard,
)

PACKED = ".weight_packed"


def modules_of(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)}


def assert_converted(source: Path, result: Path, rule: str = "mse") -> None:
    """Every module is what `convert_experts` makes of it, and every other tensor is the same."""
    then, now = all_tensors(source), all_tensors(result)
    modules = modules_of(then)
    parts = {f"{m}.weight_{part}" for m in modules for part in ("packed", "scale", "shape")}
    assert parts <= now.keys()
    assert now.keys() - parts == then.keys() - parts
    for name in now.keys() - parts:
        assert now[name].dtype == then[name].dtype
        assert torch.equal(now[name], then[name]), name
    for module in modules:
        codes, scale = then[f"{module}.weight_packed"], then[f"{module}.weight_scale"]
        expected = convert_experts(
            codes[None], scale[None], layout="pack_quantized", scale_rule=rule
        )
        assert torch.equal(now[f"{module}.weight_packed"], expected.weight[0])
        assert torch.equal(now[f"{module}.weight_scale"], expected.scale[0])
        shape = now[f"{module}.weight_shape"]
        assert shape.dtype == torch.int64
        assert shape.tolist() == [codes.shape[0], 2 * codes.shape[1]]


def test_every_expert_is_converted_and_all_else_is_the_same(source, result):
    assert len(modules_of(all_tensors(source))) == 2 * 4 * 3
    assert_converted(source, result)


def test_the_library_decompresses_to_our_values(result):
    tensors = all_tensors(result)
    config = json.loads((result / "config.json").read_text())
    scheme = QuantizationConfig.model_validate(config["quantization_config"])
    for module in modules_of(tensors):
        state = {
            leaf: tensors[f"{module}.{leaf}"]
            for leaf in ("weight_packed", "weight_scale", "weight_shape")
        }
        rows, columns = state["weight_shape"].tolist()
        library = PackedQuantizationCompressor.decompress(state, scheme.config_groups["group_0"])
        ours = dequantize(
            ConvertedExperts(state["weight_packed"][None], state["weight_scale"][None]),
            "pack_quantized",
            (1, rows, columns),
            torch.bfloat16,
        )
        assert library["weight"].dtype == torch.bfloat16
        assert torch.equal(library["weight"], ours[0])


def test_the_library_writes_the_same_tensors(result):
    """What our values give when the library compresses them with our scales."""
    tensors = all_tensors(result)
    config = json.loads((result / "config.json").read_text())
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups
    module = sorted(modules_of(tensors))[0]
    scale = tensors[f"{module}.weight_scale"]
    rows, columns = tensors[f"{module}.weight_shape"].tolist()
    converted = ConvertedExperts(tensors[f"{module}.weight_packed"][None], scale[None])
    weight = dequantize(converted, "pack_quantized", (1, rows, columns))[0]
    state = {"weight": weight, "weight_scale": scale}
    written = PackedQuantizationCompressor.compress(state, scheme["group_0"])
    assert written.keys() == {"weight_packed", "weight_scale", "weight_shape"}
    for leaf, tensor in written.items():
        ours = tensors[f"{module}.{leaf}"]
        assert (ours.dtype, ours.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(ours, tensor), leaf


def test_every_other_file_is_copied_and_the_index_is_right(source, result):
    then, now = digests(source), digests(result)
    changed = {"config.json", "model.safetensors.index.json"}
    changed |= {file.name for file in source.glob("*.safetensors")}
    assert now.keys() == then.keys() | {"kimi_k3_conversion.json"}
    for name in then.keys() - changed:
        assert now[name] == then[name], name
    index = json.loads((result / "model.safetensors.index.json").read_text())
    tensors = all_tensors(result)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_the_manifest_tells_what_is_there(source, result):
    manifest = Manifest.read(result)
    then, now = digests(source), digests(result)
    assert manifest.source == str(source)
    assert {name: shard.source.sha256 for name, shard in manifest.shards.items()} == {
        file.name: then[file.name] for file in source.glob("*.safetensors")
    }
    for name, record in (
        manifest.files | {n: s.result for n, s in manifest.shards.items()}
    ).items():
        assert record.sha256 == now[name]
        assert record.bytes == (result / name).stat().st_size
    rest = now.keys() - manifest.files.keys() - manifest.shards.keys()
    assert rest == {"kimi_k3_conversion.json", "model.safetensors.index.json"}


def test_workers_and_runs_give_the_same_files(source, result, tmp_path):
    convert_checkpoint(source, tmp_path / "again", ConvertOptions(workers=2))
    assert digests(tmp_path / "again") == digests(result)


def test_the_other_rule(source, tmp_path):
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(scale_rule="absmax"))
    assert_converted(source, tmp_path / "out", "absmax")


@pytest.mark.parametrize("scale_dtype", [torch.uint8, "e8m0"])
def test_odd_shapes_partners_in_other_shards_and_strange_names(tmp_path, scale_dtype):
    """Rows that fill no block, an odd number of scales, empty and zero-dim tensors, codes and
    scales in different shards, and names with spaces and other alphabets."""
    odd = {
        "m.experts.0.w1": (3, 32),
        "m.experts.0.w2": (7, 96),
        "专家 one.é": (1, 64),
        "e": (0, 64),
    }
    shards: dict[str, dict[str, torch.Tensor]] = {"a b.safetensors": {}, "ü.safetensors": {}}
    first, second = shards.values()
    for i, (name, (rows, columns)) in enumerate(odd.items()):
        codes, scales = mxfp4(name, rows, columns, seed=i).items()
        first[codes[0]] = codes[1]
        second[scales[0]] = scales[1]
    first["scalar"] = torch.tensor(3.5)
    first["bytes"] = torch.arange(7, dtype=torch.uint8)
    first["none"] = torch.zeros(0, 5, dtype=torch.bfloat16)
    second["m.experts.0.w1.bias"] = torch.ones(3, dtype=torch.float16)
    source = write_checkpoint(tmp_path / "sour ce", shards)
    if scale_dtype == "e8m0":
        for name in shards:
            text = (source / name).read_bytes()
            for tensor in shards[name]:
                if tensor.endswith("scale"):
                    key = json.dumps(tensor).encode() + b': {"dtype": "'
                    text = text.replace(key + b'U8"', key + b'F8_E8M0"')
            header = text.index(b"}}") + 2 - 8
            (source / name).write_bytes(header.to_bytes(8, "little") + text[8:])
        shards = {}
    convert_checkpoint(source, tmp_path / "ergebnis ß", ConvertOptions(verify=True))
    if shards:
        assert_converted(source, tmp_path / "ergebnis ß")


def test_names_as_long_as_names_can_be(tmp_path):
    name = "m" * 243 + ".safetensors"
    source = write_checkpoint(tmp_path / "s", {name: mxfp4("experts.0.w1", 16, 64)})
    (source / ("t" * 255)).write_text("x")
    (source / os.fsdecode(b"no utf-8 \xff")).write_text("y")
    convert_checkpoint(source, tmp_path / "d", ConvertOptions(verify=True))
    assert_converted(source, tmp_path / "d")
    assert digests(source).keys() < digests(tmp_path / "d").keys()


def test_an_empty_matrix_stays_empty(tmp_path):
    tensors = {
        "e.weight_packed": torch.zeros(5, 0, dtype=torch.uint8),
        "e.weight_scale": torch.zeros(5, 0, dtype=torch.uint8),
    }
    source = write_checkpoint(tmp_path / "s", {"x.safetensors": tensors})
    convert_checkpoint(source, tmp_path / "d", ConvertOptions(verify=True))
    assert all_tensors(tmp_path / "d")["e.weight_shape"].tolist() == [5, 0]


def test_one_file_without_an_index(tmp_path):
    source = write_checkpoint(tmp_path / "s", {"model.safetensors": mxfp4("experts.0.w1", 16, 64)})
    (source / "model.safetensors.index.json").unlink()
    convert_checkpoint(source, tmp_path / "d", ConvertOptions(verify=True))
    assert_converted(source, tmp_path / "d")


def test_links_are_followed_as_in_the_hub_cache(source, result, tmp_path):
    """Blobs under hashes, a snapshot of links to them."""
    snapshot = tmp_path / "snapshots" / "abc"
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate(sorted(f for f in source.rglob("*") if f.is_file())):
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = tmp_path / "blobs" / str(i)
        blob.write_bytes(file.read_bytes())
        link.symlink_to(os.path.relpath(blob, link.parent))
    convert_checkpoint(snapshot, tmp_path / "out")
    now, then = digests(tmp_path / "out"), digests(result)
    # The manifest names the source.
    assert now.pop("kimi_k3_conversion.json") != then.pop("kimi_k3_conversion.json")
    assert now == then
    assert not any(file.is_symlink() for file in (tmp_path / "out").rglob("*"))


def test_values_that_int4_cannot_hold_are_named_and_the_rest_is_kept(tmp_path):
    good, bad = mxfp4("experts.0.w1", 16, 64), mxfp4("experts.1.w1", 16, 64)
    bad["experts.1.w1.weight_scale"][3, 1] = 255
    shards = {"good.safetensors": good, "bad.safetensors": bad}
    source = write_checkpoint(tmp_path / "s", shards)
    with pytest.raises(ConversionFailed, match="1 of 2 shards could not be converted") as failure:
        convert_checkpoint(source, tmp_path / "d")
    [problem] = failure.value.problems
    assert problem.startswith("bad.safetensors: experts.1.w1, row 3, group 1 ")
    assert (tmp_path / "d" / "good.safetensors").exists()
    assert not (tmp_path / "d" / "model.safetensors.index.json").exists()
    assert not list((tmp_path / "d").rglob("*.partial"))
    bad["experts.1.w1.weight_scale"][3, 1] = 120
    write_shard(source / "bad.safetensors", bad, {"format": "pt"})
    convert_checkpoint(source, tmp_path / "d", ConvertOptions(resume=True))
    assert_converted(source, tmp_path / "d")


def test_a_gpu_that_is_not_there_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConversionFailed, match="--device cuda: expected a GPU"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(device="cuda"))
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_same_files(source, result, tmp_path):
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(device="cuda"))
    assert digests(tmp_path / "out") == digests(result)


def test_too_little_space_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(destination.Destination, "free_bytes", lambda self: 1000)
    with pytest.raises(ConversionFailed, match=r"expected [\d,]+ bytes free .*, found 1,000"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_leaves_nothing_incomplete(source, result, tmp_path, workers):
    """A limit on file sizes stands for the disk: the same calls fail half way through a file."""
    sizes = sorted(file.stat().st_size for file in result.glob("*.safetensors"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 1000, before[1]))
    try:
        with pytest.raises(ConversionFailed, match="no space left, or a limit on file sizes"):
            convert_checkpoint(source, tmp_path / "out", ConvertOptions(workers=workers))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(resume=True))
    assert digests(tmp_path / "out") == digests(result)


def test_a_disk_that_is_full_at_the_end_is_told_too(source, result, tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "out"))

    with monkeypatch.context() as patch:
        patch.setattr(destination.Destination, "copy", full)
        with pytest.raises(ConversionFailed, match="no space left"):
            convert_checkpoint(source, tmp_path / "out")
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(resume=True))
    assert digests(tmp_path / "out") == digests(result)


def test_a_place_is_counted_from_the_first_row_of_the_module(tmp_path, monkeypatch):
    """And not from the piece of it that was in work."""
    monkeypatch.setattr(shard, "PIECE", 32 * 4)
    tensors = mxfp4("experts.1.w1", 16, 64)
    tensors["experts.1.w1.weight_scale"][13, 1] = 255
    source = write_checkpoint(tmp_path / "s", {"x.safetensors": tensors})
    with pytest.raises(ConversionFailed) as failure:
        convert_checkpoint(source, tmp_path / "d")
    [problem] = failure.value.problems
    assert problem.startswith("x.safetensors: experts.1.w1, row 13, group 1 ")


@pytest.mark.parametrize(
    ("value", "message"),
    [("yes", "VLLM_KIMI_K3_NATIVE: expected 0"), ("1", "no compiler")],
)
def test_compiled_code_that_cannot_be_had_is_told_before_anything_is_written(
    source, result, tmp_path, monkeypatch, value, message
):
    monkeypatch.setenv("VLLM_KIMI_K3_NATIVE", value)
    monkeypatch.setattr(native_library, "_load", lambda: "no compiler")
    with pytest.raises(ConversionFailed, match=message) as failure:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(workers=2))
    assert failure.value.problems == []
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConversionFailed, match=message):
        verify_checkpoint(source, result, ConvertOptions())
