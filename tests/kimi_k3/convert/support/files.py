# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Checkpoints by hand: any tensors in any order, written and read without the code under test."""

import hashlib
import json
import struct
from pathlib import Path

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"
DTYPES = {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
}


def write_shard(file: Path, tensors: dict[str, torch.Tensor], metadata: dict | None = None) -> None:
    """The tensors in the given order, whatever their alignment."""
    header: dict[str, dict] = {} if metadata is None else {"__metadata__": metadata}
    data, offset = [], 0
    for name, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + count],
        }
        data.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        offset += count
    write_raw(file, json.dumps(header).encode(), b"".join(data))


def write_raw(file: Path, header: bytes, data: bytes) -> None:
    """A shard of any header and data."""
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def write_index(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    """The index of shards that were written."""
    located = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": located}))


def mxfp4(module: str, rows: int, columns: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A module of random codes and scales."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{module}.weight_packed": torch.randint(
            0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator
        ),
        f"{module}.weight_scale": torch.randint(
            110, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator
        ),
    }


def write_checkpoint(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    """Shards, index and config.json of a model in MXFP4."""
    folder.mkdir(parents=True)
    for name, tensors in shards.items():
        write_shard(folder / name, tensors, {"format": "pt"})
    write_index(folder, shards)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization()}))
    return folder


def quantization() -> dict:
    """As Kimi-K3 has it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                },
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as the safetensors library reads it."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder and below."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
