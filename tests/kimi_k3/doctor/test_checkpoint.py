# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What is wrong with a model's folder is named; nothing is ever fetched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3_checkpoint.formats import Format
from k3_checkpoint.presets import PRESETS
from k3_checkpoint.shards import INDEX_NAME
from k3_checkpoint.spec import ExpertFormat
from k3_checkpoint.write import write_checkpoint
from kimi_k3.convert.source import WORK_NAME
from kimi_k3.doctor.checkpoint import Model, NoSuchModelError, locate, look
from kimi_k3.doctor.findings import Level

EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1"


def seen(folder: Path | None, name: str = "k3") -> tuple[Format | None, dict[str, str]]:
    """Format, and the texts of all problems by subject."""
    _, stored, rows = look(Model(folder, name))
    return stored, {row.subject: row.text for row in rows if row.level is Level.PROBLEM}


@pytest.mark.parametrize(("kind", "stored"), [("mxfp4", Format.MXFP4), ("int4", Format.INT4)])
def test_sound_checkpoints(kind, stored, request):
    assert seen(request.getfixturevalue(kind)) == (stored, {})


def test_unquantized_checkpoint(tmp_path):
    spec = replace(PRESETS["tiny"], layers=2, vision=None, expert_format=ExpertFormat.BF16)
    write_checkpoint(tmp_path / "k3", spec, shards=1)
    assert seen(tmp_path / "k3") == (Format.PLAIN, {})


def test_an_unfinished_conversion_is_named(int4_copy):
    (int4_copy / WORK_NAME).mkdir()
    stored, problems = seen(int4_copy)
    assert stored is None
    assert f"kimi-k3 convert SRC {int4_copy} --resume" in problems["files"]


@pytest.mark.parametrize("kind", ["mxfp4_copy", "int4_copy"])
def test_damage_is_named(kind, request):
    folder = request.getfixturevalue(kind)
    index = json.loads((folder / INDEX_NAME).read_text())
    scale = f"{EXPERT}.weight_scale"
    file = folder / index["weight_map"][scale]
    tensors = load_file(file)
    save_file(tensors | {scale: tensors[scale][:, :2].contiguous()}, file)
    _, problems = seen(folder)
    assert f"{scale}: expected" in problems["tensors"]
    del tensors[scale]
    save_file(tensors, file)
    _, problems = seen(folder)
    assert scale in problems["tensors"]
    file.write_bytes(file.read_bytes()[:-7])
    stored, problems = seen(folder)
    assert stored is None
    assert f"1 of 2 are damaged: {file.name}" in problems["shards"]
    file.unlink()
    _, problems = seen(folder)
    assert f"{file.name} missing" in problems["shards"]


def test_experts_that_are_not_what_config_json_says(mxfp4_copy, int4_copy):
    (mxfp4_copy / "config.json").write_bytes((int4_copy / "config.json").read_bytes())
    _, problems = seen(mxfp4_copy)
    assert problems == {"experts": "config.json says int4, the shards hold MXFP4"}
    packed = f"{EXPERT}.weight_packed"
    file = mxfp4_copy / json.loads((mxfp4_copy / INDEX_NAME).read_text())["weight_map"][packed]
    tensors = load_file(file)
    save_file(tensors | {packed: torch.zeros(64, 16, dtype=torch.int32)}, file)
    _, problems = seen(mxfp4_copy)
    assert problems["experts"].startswith("of several formats")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected a Kimi-K3"),
        ('{"text_config": 3}', "text_config: expected an object"),
    ],
)
def test_configurations_that_are_none(mxfp4_copy, text, message):
    (mxfp4_copy / "config.json").write_text(text)
    _, problems = seen(mxfp4_copy)
    assert message in problems["config.json"]


def test_another_architecture(mxfp4_copy):
    file = mxfp4_copy / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["Llama"]}))
    _, problems = seen(mxfp4_copy)
    assert "found 'Llama'" in problems["architecture"]
    file.write_text(json.dumps(config | {"architectures": {}}))
    _, problems = seen(mxfp4_copy)
    assert "found None" in problems["architecture"]


def test_folders_without_files(tmp_path):
    assert "it is no checkpoint" in seen(tmp_path)[1]["config.json"]


def test_names_that_can_be_no_model(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "/nowhere/at/all", "a/b/c", "", "-/x", str(tmp_path / "file")):
        with pytest.raises(NoSuchModelError, match="expected a checkpoint's folder"):
            locate(name)


def test_a_hub_id_is_looked_up_in_the_cache_alone(tmp_path, monkeypatch):
    import huggingface_hub.constants
    import huggingface_hub.file_download

    for module in (huggingface_hub.constants, huggingface_hub.file_download):
        if hasattr(module, "HF_HUB_CACHE"):
            monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
    found = locate("moonshotai/Kimi-K3")
    assert found.folder is None
    assert "hf download moonshotai/Kimi-K3" in seen(None, found.name)[1]["files"]

    commit = "a" * 40
    cached = tmp_path / "models--moonshotai--Kimi-K3"
    snapshot = cached / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert locate("moonshotai/Kimi-K3").folder == snapshot
