# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A damaged checkpoint, or a source that is another one, is refused with everything named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.manifest import MANIFEST_NAME
from kimi_k3.fidelity.comparison import Choice, prepare
from kimi_k3.fidelity.files import ReportError

EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1"


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / INDEX_NAME).read_text())
    return folder / index["weight_map"][tensor]


def change(folder: Path, tensor: str, value: torch.Tensor) -> None:
    """Replace a tensor, and drop the manifest, whose sizes would be the first to tell."""
    file = shard_of(folder, tensor)
    save_file(load_file(file) | {tensor: value}, file)
    (folder / MANIFEST_NAME).unlink(missing_ok=True)


def test_every_matrix_has_its_place(int4, mxfp4):
    report, matrices = prepare(int4, Choice())
    assert report.source == mxfp4
    assert len(matrices) == 2 * 16 * 3
    one = next(matrix for matrix in matrices if matrix.name == EXPERT)
    assert (one.rows, one.columns, one.layer, one.projection) == (64, 128, 1, "w1")
    tensors = load_file(shard_of(int4, f"{EXPERT}.weight_packed"))
    words = tensors[f"{EXPERT}.weight_packed"].view(torch.uint8).numpy()
    assert one.codes.read(2, 3) == words[2:5].tobytes()
    source = load_file(shard_of(mxfp4, f"{EXPERT}.weight_scale"))
    assert one.source_scales is not None
    assert one.source_scales.read(0, 64) == source[f"{EXPERT}.weight_scale"].numpy().tobytes()


def test_layers_are_chosen(int4):
    _, matrices = prepare(int4, Choice(layers={2}))
    assert {matrix.layer for matrix in matrices} == {2}
    with pytest.raises(ReportError, match="layers 0, 7: no int4 matrix there, only in 1 to 2"):
        prepare(int4, Choice(layers={0, 2, 7}))


def test_damaged_shards_are_named(int4_copy):
    first, second = sorted(int4_copy.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-5])
    with pytest.raises(ReportError, match=f"{first.name}: .*truncated"):
        prepare(int4_copy, Choice())
    second.unlink()
    with pytest.raises(ReportError, match=f"{second.name} missing"):
        prepare(int4_copy, Choice())


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight_packed", torch.zeros(64, 16), r"weight_packed: expected I32 .* found F32"),
        ("weight_packed", torch.zeros(64, 15, dtype=torch.int32), r"expected I32 .*\[64, 15\]"),
        ("weight_scale", torch.zeros(64, 4), r"weight_scale: expected BF16 \[64, 4\], found F32"),
        ("weight_scale", torch.zeros(64, 3).bfloat16(), r"\[64, 4\], found BF16 \[64, 3\]"),
    ],
)
def test_wrong_tensors_are_named(int4_copy, leaf, value, message):
    change(int4_copy, f"{EXPERT}.{leaf}", value)
    with pytest.raises(ReportError, match=f"{EXPERT}: .*{message}"):
        prepare(int4_copy, Choice())


def test_a_scale_that_is_missing_is_named(int4_copy):
    name = f"{EXPERT}.weight_scale"
    file = shard_of(int4_copy, name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    (int4_copy / MANIFEST_NAME).unlink()
    with pytest.raises(ReportError, match=f"{EXPERT}: weight_packed without its weight_scale"):
        prepare(int4_copy, Choice())


def test_sizes_are_held_to_the_manifest(int4_copy):
    file = shard_of(int4_copy, f"{EXPERT}.weight_packed")
    save_file(load_file(file) | {"more": torch.zeros(1)}, file)
    with pytest.raises(ReportError, match=f"{file.name}: expected .* bytes by {MANIFEST_NAME}"):
        prepare(int4_copy, Choice())
    (int4_copy / MANIFEST_NAME).write_text("{}")
    with pytest.raises(ReportError, match="not a conversion's manifest"):
        prepare(int4_copy, Choice())


def test_a_conversion_without_its_index_is_not_finished(int4_copy):
    (int4_copy / INDEX_NAME).unlink()
    with pytest.raises(ReportError, match=f"{INDEX_NAME}: not there, so the conversion is not fin"):
        prepare(int4_copy, Choice())


def test_other_checkpoints_are_refused(mxfp4, tmp_path):
    with pytest.raises(ReportError, match="nothing in int4: its experts are MXFP4"):
        prepare(mxfp4, Choice())
    with pytest.raises(ReportError, match="expected a checkpoint's folder, found none"):
        prepare(tmp_path / "nowhere", Choice())
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ReportError, match="nothing in int4: no weight_packed in any shard"):
        prepare(tmp_path, Choice())
    (tmp_path / ".kimi_k3_conversion").mkdir()
    with pytest.raises(ReportError, match="the conversion is not finished"):
        prepare(tmp_path, Choice())


def test_a_copy_of_the_source_will_do(int4, mxfp4_copy):
    report, _ = prepare(int4, Choice(source=mxfp4_copy))
    assert (report.source, report.without) == (mxfp4_copy, "")


def test_another_source_is_refused(int4, mxfp4_copy):
    change(mxfp4_copy, f"{EXPERT}.weight_scale", torch.zeros(64, 5, dtype=torch.uint8))
    with pytest.raises(ReportError) as caught:
        prepare(int4, Choice(source=mxfp4_copy))
    assert "not the shard that was converted" in str(caught.value)
    assert f"{EXPERT}: other sizes or dtypes than in the result" in str(caught.value)
    assert caught.value.problems[-1] == "it is no source of this checkpoint"
    other = mxfp4_copy / "other"
    other.mkdir()
    save_file({"a": torch.zeros(1)}, other / "model.safetensors")
    with pytest.raises(ReportError, match="not there, or without codes or scales in MXFP4"):
        prepare(int4, Choice(source=other))


def test_a_source_that_is_gone_is_no_error(int4_copy):
    manifest = int4_copy / MANIFEST_NAME
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(found | {"source": "/gone/k3"}))
    report, matrices = prepare(int4_copy, Choice())
    assert report.source is None
    assert "/gone/k3, is not there any more" in report.without
    assert matrices[0].source_codes is None
    manifest.unlink()
    report, _ = prepare(int4_copy, Choice())
    assert "does not say what it was made of" in report.without
    assert report.scale_rule == "unknown"
