# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What cannot be served ends `vllm serve` early, with an exit code and a message that names it."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.models.kimi_k3.cpu.support.k3_server import environment, free_port, serve_command

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.3.block_sparse_moe.experts.5."
SECONDS = 60

pytestmark = pytest.mark.slow


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def drop(folder: Path, prefix: str) -> None:
    """Take tensors out of shards and index."""
    index = json.loads((folder / INDEX).read_text())
    names = [n for n in index["weight_map"] if n.startswith(prefix)]
    for file in {index["weight_map"][n] for n in names}:
        kept = {n: t for n, t in load_file(folder / file).items() if n not in names}
        save_file(kept, folder / file, metadata={"format": "pt"})
    for name in names:
        del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


def remove_shard(folder: Path) -> None:
    (folder / "model-00002-of-000003.safetensors").unlink()


def truncate_shard(folder: Path) -> None:
    file = folder / "model-00002-of-000003.safetensors"
    with file.open("r+b") as shard:
        shard.truncate(file.stat().st_size - 1000)


def change_dtype(folder: Path) -> None:
    """Codes of an expert become signed bytes, in the header alone."""
    file = shard_of(folder, f"{EXPERT}w1.weight_packed")
    data = file.read_bytes()
    was = f'"{EXPERT}w1.weight_packed":{{"dtype":"U8"'.encode()
    assert data.count(was) == 1
    file.write_bytes(data.replace(was, was.replace(b"U8", b"I8")))


def change_activation(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))


def name_twice(folder: Path) -> None:
    """The index gives one tensor to two shards."""
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(
        text.replace(
            '"weight_map": {',
            '"weight_map": {"model.norm.weight": "model-00001-of-000003.safetensors",',
        )
    )


@dataclass(frozen=True)
class Case:
    """One bad input: what is done to a good checkpoint, and what the message must say."""

    says: tuple[str, ...]
    spoil: Callable[[Path], None] = lambda folder: None
    arguments: tuple[str, ...] = field(default=())


CASES = {
    "missing shard": Case(
        ("model-00002-of-000003.safetensors: not there; the index names it for",), remove_shard
    ),
    "truncated shard": Case(
        ("model-00002-of-000003.safetensors: expected", "bytes by its header", "truncated"),
        truncate_shard,
    ),
    "wrong dtype": Case(
        (f"{EXPERT}w1.weight_packed: expected U8 [64, 64], found I8 [64, 64]",), change_dtype
    ),
    "missing expert": Case(
        (f"{EXPERT.rstrip('.')}: w1.weight_packed, w1.weight_scale, w2.weight_packed",),
        lambda folder: drop(folder, EXPERT),
    ),
    "missing weight_scale": Case(
        (f"{EXPERT.rstrip('.')}: w2.weight_scale in no shard",),
        lambda folder: drop(folder, f"{EXPERT}w2.weight_scale"),
    ),
    "unknown activation": Case(
        ("hidden_act: expected one of ('situ', 'silu'), found 'gelu'",), change_activation
    ),
    "heads over ranks": Case(
        ("num_attention_heads: expected a multiple of the tensor-parallel size 3, found 4",),
        arguments=("--tensor-parallel-size=3",),
    ),
    "named twice": Case(
        (f"{INDEX}: no index of safetensors shards", "found named twice: model.norm.weight"),
        name_twice,
    ),
}


@dataclass(frozen=True)
class End:
    """How a server ended."""

    code: int | None
    seconds: float
    output: str


@pytest.fixture(scope="module")
def ends(checkpoint, tmp_path_factory) -> dict[str, End]:
    """Every case's server, two at a time."""
    good = checkpoint()

    def serve(name: str) -> End:
        folder = tmp_path_factory.mktemp("bad") / "checkpoint"
        shutil.copytree(good, folder)
        case = CASES[name]
        case.spoil(folder)
        start = time.monotonic()
        try:
            ended = subprocess.run(
                serve_command(folder, free_port(), *case.arguments),
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=2 * SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as still:
            return End(None, time.monotonic() - start, str(still.stdout))
        return End(ended.returncode, time.monotonic() - start, ended.stdout)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(serve, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_server_says_what_is_wrong_and_ends(ends, name):
    end = ends[name]
    for words in CASES[name].says:
        assert words in end.output, end.output[-4000:]
    assert end.code not in (0, None)
    assert end.seconds < SECONDS
