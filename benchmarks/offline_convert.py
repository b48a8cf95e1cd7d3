# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How fast `kimi-k3 convert` is, beside copying and checksumming the same files.

    python benchmarks/offline_convert.py                          # 4 GB where temporary files go
    python benchmarks/offline_convert.py --folder /dev/shm        # without a disk: CPU alone
    python benchmarks/offline_convert.py --gigabytes 20 --shards 4 --rounds 1   # memory bound

Experts have Kimi-K3's sizes. The result is proven first: all of it converted again and compared,
and decompressed by compressed-tensors. Then copy and conversion take turns in every round, with as
many processes. A copy is: read, SHA-256 of what was read, write, SHA-256 of what was written,
fsync; the conversion does these too. Both read what the page cache holds of the source; --cold
drops it before each. The recipe is timed on experts in memory, without files, which favours it.
Every figure comes by the clock and by CPU seconds of all processes; on a machine that others use,
the second is the one to compare, and it is what is judged. "start" is a conversion of next to
nothing with as many workers, and is taken off where not said otherwise: it is seconds, whatever the
size. Exit code 1 where the result is wrong or a bar is missed.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _options import amount, json_file, positive
from recipe import convert_step_by_step

from k3_checkpoint import Checkpoint, shards, spec, tensors
from kimi_k3 import convert as conversion
from kimi_k3.convert.verify import verify_checkpoint

PIECE = 8 << 20
OF_COPY, OF_RECIPE, MEMORY = 0.6, 20.0, 2 << 30
ROWS = {"w1": (3072, 3584), "w2": (3584, 3072), "w3": (3072, 3584)}
COPY = f"""
import hashlib, os, sys
buffer = memoryview(bytearray({PIECE}))
for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
    read, written = hashlib.sha256(), hashlib.sha256()
    with open(source, "rb", buffering=0) as a, open(target, "xb", buffering=0) as b:
        while count := a.readinto(buffer):
            read.update(buffer[:count])
            b.write(buffer[:count])
            written.update(buffer[:count])
        os.fsync(b.fileno())
    assert read.digest() == written.digest()
"""


def write_source(folder: Path, gigabytes: float, count: int) -> int:
    """Shards of random experts and about 4 % bfloat16. Returns their bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(spec.ModelSpec().config()))
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(112, 126, (8 << 20,), dtype=torch.uint8, generator=generator)
    wanted = gigabytes * 1e9 / count
    parts = []
    for i in range(count):
        prefix = f"language_model.model.layers.{i + 1}"
        rows = int(wanted * 0.04 / (2 * 7168))
        role, unit = tensors.Role, f"{prefix}.self_attn.q_proj.weight"
        found = [tensors.TensorSpec(unit, "BF16", (rows, 7168), role.LINEAR, unit)]
        expert = 0
        while sum(t.nbytes for t in found) < wanted:
            unit = f"{prefix}.block_sparse_moe.experts.{expert}."
            for name, (n, k) in ROWS.items():
                codes = (f"{unit}{name}.weight_packed", "U8", (n, k // 2), role.CODES, unit)
                scales = (f"{unit}{name}.weight_scale", "U8", (n, k // 32), role.SCALES, unit)
                found += [tensors.TensorSpec(*codes), tensors.TensorSpec(*scales)]
            expert += 1
        parts.append(shards.Shard(f"model-{i + 1:05d}-of-{count:06d}.safetensors", tuple(found)))

    def contents(wanted):
        for tensor in wanted:
            source = exponents if tensor.role is tensors.Role.SCALES else pool
            whole = []
            left = tensor.nbytes
            while left:
                at = int(torch.randint(0, len(source) // 2, (), generator=generator))
                whole.append(source[at : at + left])
                left -= len(whole[-1])
            yield torch.cat(whole)

    for part in parts:
        shards.write_shard(folder, part, contents)
    shards.write_index(folder, parts)
    return Checkpoint.open(folder).nbytes


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process and its children."""

    def busy() -> float:
        return sum(os.times()[:4])

    start, work = time.perf_counter(), busy()
    call()
    return time.perf_counter() - start, busy() - work


def copy(source: Path, target: Path, workers: int) -> None:
    """Copy all shards, a share of them in each process."""
    target.mkdir()
    files = Checkpoint.open(source).files
    running = []
    for i in range(workers):
        pairs = [str(path) for f in files[i::workers] for path in (f, target / f.name)]
        running.append(subprocess.Popen([sys.executable, "-c", COPY, *pairs]))
    if sum(process.wait() for process in running):
        raise SystemExit("error: the copy failed")


def convert(source: Path, target: Path, workers: int) -> int:
    """Convert; returns the largest resident memory of a process, in bytes."""
    code = (
        "import resource, sys; from pathlib import Path; "
        "from kimi_k3 import convert as c; "
        "o = c.ConvertOptions(workers=int(sys.argv[3])); "
        "c.convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), o); "
        "own = int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]); "
        "print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))"
    )
    command = [sys.executable, "-c", code, str(source), str(target), str(workers)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) * 1024


def drop(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for file in Checkpoint.open(folder).files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def time_recipe(threads: int, rounds: int) -> tuple[int, list[tuple[float, float]]]:
    """Bytes of MXFP4, scales included, and times of the step-by-step recipe on eight experts."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    n, k = ROWS["w1"]
    weight = torch.randint(0, 256, (8, n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(112, 126, (8, n, k // 32), dtype=torch.uint8, generator=generator)
    import mxfp4_int4 as package

    new = package.convert_experts(weight[:1], scale[:1], layout="aiter", scale_rule="absmax")
    if not torch.equal(convert_step_by_step(weight[:1], scale[:1])[0], new.weight):
        raise SystemExit("error: the recipe gives other codes than the rule absmax")
    size = weight.numel() + scale.numel()
    return size, [timed(lambda: convert_step_by_step(weight, scale)) for _ in range(rounds)]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Prove, time, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gigabytes", type=amount, default=4.0)
    parser.add_argument("--shards", type=positive, default=4)
    parser.add_argument("--workers", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--folder", type=Path, help="where files go; default: temporary files")
    parser.add_argument("--cold", action="store_true", help="source not in the page cache")
    parser.add_argument("--json", type=json_file, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        base = Path(name)
        size = write_source(base / "source", args.gigabytes, args.shards)
        write_source(base / "small", 0.06 * args.workers, args.workers)
        memory = convert(base / "source", base / "result", args.workers)
        verify_checkpoint(
            base / "source", base / "result", conversion.ConvertOptions(workers=args.workers)
        )
        shutil.rmtree(base / "result")
        times: dict[str, list[tuple[float, float]]] = {"copy": [], "convert": [], "start": []}
        for _ in range(args.rounds):
            for what in times:
                source = base / ("small" if what == "start" else "source")
                if args.cold:
                    os.sync()
                    drop(source)
                work = copy if what == "copy" else convert
                times[what].append(timed(lambda: work(source, base / "out", args.workers)))  # noqa: B023
                shutil.rmtree(base / "out")
    recipe_size, recipe = time_recipe(args.workers, 3)
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "workers": args.workers,
        "bytes": size,
        "page_cache": "cold" if args.cold else "warm",
        "folder": str(args.folder or "temporary files"),
        "peak_memory_bytes": memory,
    }
    for i, clock in enumerate(("wall", "cpu")):
        start = statistics.median(t[i] for t in times["start"])
        pairs = [(a[i], b[i]) for a, b in zip(times["copy"], times["convert"], strict=True)]
        of_recipe = statistics.median(t[i] for t in recipe) / recipe_size * size
        found[clock] = {
            "copy_gb_per_s": spread([size / copied / 1e9 for copied, _ in pairs]),
            "convert_gb_per_s": spread([size / converted / 1e9 for _, converted in pairs]),
            "recipe_gb_per_s": spread([recipe_size / t[i] / 1e9 for t in recipe]),
            "start_s": start,
            "of_copy_start_included": spread([c / t for c, t in pairs]),
            "of_copy": spread([c / (t - start) for c, t in pairs]),
            "of_recipe": spread([of_recipe / (t - start) for _, t in pairs]),
        }
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    missed = [
        text
        for text, fine in (
            (f"{OF_COPY:.0%} of the copy", found["cpu"]["of_copy"]["median"] >= OF_COPY),
            (f"{OF_RECIPE:.0f} x the recipe", found["cpu"]["of_recipe"]["median"] >= OF_RECIPE),
            ("2 GiB a process", memory < MEMORY),
        )
        if not fine
    ]
    if missed:
        raise SystemExit(f"error: missed {', '.join(missed)}")


if __name__ == "__main__":
    main()
