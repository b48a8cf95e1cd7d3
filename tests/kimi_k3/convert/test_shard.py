# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One shard: pieces of tensors, checksums on the way, order and alignment of the result, memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3_checkpoint.headers import ELEMENT_BYTES, read_full_header
from kimi_k3.convert import (
    ConvertOptions,
    Manifest,
    convert_checkpoint,
    digest,
    shard,
)
from tests.kimi_k3.convert.support.files import all_tensors, digests, mxfp4, write_checkpoint

# Memory of a process that converts a shard, and what the same shard takes on the disk.
MEASURE = """
import sys
from pathlib import Path
from kimi_k3 import convert as conversion
conversion.convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
# Not ru_maxrss, which begins with the memory of whoever started this process.
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.parametrize("piece", [500, 4096])
def test_pieces_of_any_size_give_the_same_files(source, result, tmp_path, monkeypatch, piece):
    """Pieces smaller than a row, and ones that end within rows and tensors."""
    monkeypatch.setattr(shard, "PIECE", piece)
    monkeypatch.setattr(digest, "READ_PIECE", piece // 3)
    convert_checkpoint(source, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(result)


@pytest.mark.parametrize("order", ["forward", "backward", "scales first"])
def test_checksums_hold_for_any_order_of_tensors(tmp_path, monkeypatch, order):
    """What comes out of order is read from the file again."""
    monkeypatch.setattr(shard, "PIECE", 4096)
    tensors = {"norm": torch.randn(1000)}
    for i in range(6):
        tensors |= mxfp4(f"experts.{i}.w1", 64, 256, seed=i)
        tensors[f"between.{i}"] = torch.randn(999).bfloat16()
    names = list(tensors)
    if order == "backward":
        names.reverse()
    elif order == "scales first":
        names.sort(key=lambda name: not name.endswith("scale"))
    source = write_checkpoint(
        tmp_path / "s", {"x.safetensors": {name: tensors[name] for name in names}}
    )
    convert_checkpoint(source, tmp_path / "d")
    record = Manifest.read(tmp_path / "d").shards["x.safetensors"]
    assert record.source.sha256 == digests(source)["x.safetensors"]
    assert record.result.sha256 == digests(tmp_path / "d")["x.safetensors"]
    assert torch.equal(all_tensors(tmp_path / "d")["between.3"], tensors["between.3"])


def test_tensors_lie_at_multiples_of_their_element(tmp_path):
    tensors = {
        "a": torch.zeros(3, dtype=torch.uint8),
        **mxfp4("experts.0.w1", 1, 32),
        "b": torch.ones(5).bfloat16(),
        "c": torch.ones(3),
        **mxfp4("experts.1.w1", 3, 32),
    }
    source = write_checkpoint(tmp_path / "s", {"x.safetensors": tensors})
    convert_checkpoint(source, tmp_path / "d", ConvertOptions(verify=True))
    header = read_full_header(tmp_path / "d" / "x.safetensors")
    assert len(header.entries) == len(tensors) + 2
    for name, (start, _) in header.spans.items():
        assert start % ELEMENT_BYTES[header.entries[name].dtype] == 0, name
    assert header.metadata == {"format": "pt"}


def memory_of(folder: Path, shapes: dict[str, tuple[int, int]]) -> int:
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"{name}.weight_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
    source = write_checkpoint(folder / "source", {"x.safetensors": tensors})
    command = [sys.executable, "-c", MEASURE, source, folder / "out"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(process.stdout.splitlines()[-1]) << 10


@pytest.mark.slow
def test_memory_does_not_grow_with_shards_or_tensors(tmp_path):
    """One tensor of 0.3 GB takes what one of 18 MB does, far under the bound of 2 GiB."""
    small = memory_of(tmp_path / "small", {"experts.0.w1": (2048, 16384)})
    large = memory_of(tmp_path / "large", {"experts.0.w1": (32768, 16384)})
    assert large < 1 << 30
    assert large - small < 128 << 20
