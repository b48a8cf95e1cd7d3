# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 make-checkpoint`: names, sizes and files of small checkpoints and of Kimi-K3's own."""

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from k3_checkpoint.check import check_checkpoint
from k3_checkpoint.headers import read_header
from k3_checkpoint.presets import PRESETS
from k3_checkpoint.shards import split
from k3_checkpoint.spec import ExpertFormat, ModelSpec, Stack
from k3_checkpoint.tensors import checkpoint_tensors
from k3_checkpoint.write import write_checkpoint

TINY = PRESETS["tiny"]


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


def run(*arguments: str) -> subprocess.CompletedProcess:
    script = Path(sys.executable).with_name("kimi-k3")
    return subprocess.run(
        [script, "make-checkpoint", *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, TINY, shards=3)
    return folder


def test_kimi_k3_has_its_published_tensors():
    """Counts and sizes of the published checkpoint, and one of each kind of name and shape."""
    tensors = {t.name: t for t in checkpoint_tensors(PRESETS["k3-shapes"])}
    text = [t for t in tensors.values() if t.name.startswith("language_model.")]
    assert len(tensors) == 497_220
    assert len(text) == 497_052
    assert round(sum(t.nbytes for t in text) / 1e12, 4) == 1.56
    layer = "language_model.model.layers"
    expected = {
        f"{layer}.0.self_attn.q_proj.weight": ("BF16", (12288, 7168)),
        f"{layer}.0.self_attn.A_log": ("F32", (128,)),
        f"{layer}.0.self_attn.q_conv1d.weight": ("F32", (12288, 1, 4)),
        f"{layer}.0.self_attn.f_b_proj.weight": ("BF16", (12288, 128)),
        f"{layer}.0.mlp.gate_proj.weight": ("BF16", (33792, 7168)),
        f"{layer}.3.self_attn.q_b_proj.weight": ("BF16", (18432, 1536)),
        f"{layer}.3.self_attn.kv_a_proj_with_mqa.weight": ("BF16", (576, 7168)),
        f"{layer}.91.self_attn.kv_b_proj.weight": ("BF16", (24576, 512)),
        f"{layer}.92.self_attn.g_proj.weight": ("BF16", (12288, 7168)),
        f"{layer}.1.block_sparse_moe.gate.e_score_correction_bias": ("F32", (896,)),
        f"{layer}.1.block_sparse_moe.experts.895.w1.weight_packed": ("U8", (3072, 1792)),
        f"{layer}.1.block_sparse_moe.experts.895.w2.weight_scale": ("U8", (3584, 96)),
        f"{layer}.1.block_sparse_moe.shared_experts.down_proj.weight": ("BF16", (7168, 6144)),
        f"{layer}.92.mlp_res_proj.weight": ("BF16", (1, 7168)),
        "language_model.lm_head.weight": ("BF16", (163840, 7168)),
    }
    for name, (dtype, shape) in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (dtype, shape), name
    spec = PRESETS["k3-shapes"]
    assert sum(spec.is_mla(i) for i in range(93)) == 24
    assert spec.is_mla(91)
    assert spec.is_mla(92)


def test_experts_stay_whole_and_out_of_order():
    parts = split(checkpoint_tensors(PRESETS["k3-shapes"]), 96)
    assert len(parts) == 96
    sizes = [p.nbytes for p in parts]
    assert max(sizes) < 1.02 * min(sizes)
    for part in parts[:3]:
        units = [t.unit for t in part.tensors if ".experts." in t.name]
        for i in range(0, len(units), 6):
            assert len(set(units[i : i + 6])) == 1
        ids = [int(u.split(".")[-2]) for u in units[::6]]
        assert ids != sorted(ids)


@pytest.mark.slow
def test_headers_only_checkpoint_is_quick_small_and_complete(tmp_path):
    start = time.monotonic()
    result = run(str(tmp_path / "k3"), "--preset=k3-shapes")
    assert result.returncode == 0, result.stderr
    assert "497,220 tensors, 1,560.860 GB in 96 shards" in result.stdout
    written = time.monotonic() - start
    on_disk = sum(f.stat().st_blocks * 512 for f in (tmp_path / "k3").iterdir())
    assert on_disk < 300e6
    start = time.monotonic()
    entries = {}
    for file in (tmp_path / "k3").glob("*.safetensors"):
        entries |= read_header(file)
    assert len(entries) == 497_220
    # Seconds on an idle machine are 8 and 3; the bound only catches a change of order.
    assert written < 60
    assert time.monotonic() - start < 30
    check_checkpoint(tmp_path / "k3", PRESETS["k3-shapes"])


def test_files_are_what_their_headers_say(tiny):
    tensors = all_tensors(tiny)
    specs = {t.name: t for t in checkpoint_tensors(TINY)}
    assert tensors.keys() == specs.keys()
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    for name, tensor in tensors.items():
        assert tensor.shape == specs[name].shape
        assert tensor.dtype == dtypes[specs[name].dtype]
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == specs.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in specs.values())
    check_checkpoint(tiny, TINY)


def test_values_keep_a_sane_scale(tiny):
    tensors = all_tensors(tiny)
    a_log = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (128,)
    assert a_log[:4].ne(0).all()
    assert not a_log[4:].any()
    for name, tensor in tensors.items():
        if tensor.dtype is torch.uint8:
            continue
        assert torch.isfinite(tensor.float()).all(), name
        if name.endswith("proj.weight") and tensor.ndim == 2 and tensor.shape[0] > 16:
            assert tensor.float().std() * tensor.shape[-1] ** 0.5 == pytest.approx(1.0, abs=0.1)
    # The scale rule puts the largest code of a group at 4 or 6 (or, rounded up, at 8 -> 6).
    codes = tensors["language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"]
    nibbles = torch.stack([codes & 7, (codes >> 4) & 7], dim=-1).view(64, -1, 32)
    assert (nibbles.amax(dim=-1) >= 6).all()


def test_seed_decides_and_shards_do_not(tmp_path):
    spec = replace(TINY, layers=2, vision=None)
    for name, shards, seed in (("a", 2, 1), ("b", 2, 1), ("c", 5, 1), ("d", 2, 2)):
        write_checkpoint(tmp_path / name, spec, shards=shards, seed=seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    a, c, d = (all_tensors(tmp_path / name) for name in "acd")
    assert all(torch.equal(a[name], c[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], d["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "spec",
    [
        TINY,
        replace(TINY, vision=None, expert_format=ExpertFormat.BF16),
        replace(TINY, stack=Stack.KDA),
        replace(TINY, stack=Stack.MLA, heads=8),
        PRESETS["small"],
        PRESETS["k3-shapes"],
    ],
    ids=["tiny", "bf16", "kda", "mla", "small", "k3"],
)
def test_config_json_describes_its_model(spec):
    config = json.loads(json.dumps(spec.config()))
    again = ModelSpec.from_config(config)
    assert list(checkpoint_tensors(again)) == list(checkpoint_tensors(spec))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": 3}, "first_k_dense_replace: expected 1"),
        (
            {"linear_attn_config": {"head_dim": 64, "kda_layers": [1], "full_attn_layers": [1]}},
            "each of the layers 1 to 5 once",
        ),
        ({"num_experts": None}, "not that of a Kimi-K3 model"),
    ],
)
def test_other_models_are_refused(change, message):
    config = replace(TINY, vision=None).config() | change
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config(config)


def test_quantization_config_is_valid_for_compressed_tensors():
    from compressed_tensors.quantization import QuantizationConfig

    config = TINY.config()["text_config"]["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.format == "mxfp4-pack-quantized"
    weights = parsed.config_groups["group_0"].weights
    assert (weights.num_bits, weights.group_size) == (4, 32)


def test_packed_experts_decompress_to_the_values_that_were_rounded(tiny):
    """compressed-tensors reads the codes and scales as our own definition does."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import expand_mxfp4

    tensors = all_tensors(tiny)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight"
    codes, scales = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
    plain = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)
    values = plain * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
    assert torch.equal(expand_mxfp4(codes, scales, torch.float32), values)


def test_tokenizer_encodes_everything_and_reads_it_back(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == TINY.vocab_size
    for text in ("hello world", "Ünïcödé 漢字 🙂", " leading\n\ttabs  and spaces "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert max(ids) < TINY.vocab_size
        assert tokenizer.decode(ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|open|>user<|sep|>hi<|close|>user<|sep|><|open|>assistant<|sep|>"
    assert len(tokenizer.encode("<|open|>", add_special_tokens=False)) == 1
    assert tokenizer.eos_token_id == TINY.config()["eos_token_id"]


def test_command_refuses_what_it_cannot_write(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    result = run(str(tmp_path / "full"))
    assert result.returncode != 0
    assert "found files in it" in " ".join(result.stderr.replace("│", " ").split())
    result = run(str(tmp_path / "new"), "--latent-size=100")
    assert result.returncode != 0
    assert "latent_size must be a multiple of 32" in " ".join(
        result.stderr.replace("│", " ").split()
    )
    assert not (tmp_path / "new").exists()
    result = run(str(tmp_path / "new"), "--heads=3")
    assert "hidden_size // heads must be even" in " ".join(result.stderr.replace("│", " ").split())
    result = run(str(tmp_path / "new"), "--shards=100000")
    assert "shards: expected 1 to" in " ".join(result.stderr.replace("│", " ").split())
