# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How fast MXFP4 experts become int4, beside a copy of the same bytes and the step-by-step recipe.

    python benchmarks/convert.py                      # CPU, two small shapes
    python benchmarks/convert.py --device cuda        # one Kimi-K3 layer of a TP8 rank

Verifies every result before it times anything, runs the variants in turn within each round, and
reports medians with the spread (quartiles): each of a layer's two matrices alone, and one after the
other as a load converts them. Bytes over time are the packed MXFP4 bytes. On a CPU
both implementations are timed: compiled code ("mse", "absmax") where it is installed, and torch
("lookup ..."). The recipe writes AITER's layout, whatever the others write. Never a test: a result
that differs ends the run with an error.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _options import device, json_file, positive
from _result import machine, spread, write
from recipe import convert_step_by_step

from mxfp4_int4 import native_library
from mxfp4_int4.convert import (
    LOOKUP,
    NAIVE,
    NATIVE,
    Implementation,
    _convert,
    pick_implementation,
)
from mxfp4_int4.layouts import LAYOUTS

HIDDEN, INTERMEDIATE, EXPERTS = 3584, 3072, 896  # Kimi-K3's routed experts


def k3_shapes(tp: int = 1, ep: int = 1) -> dict[str, tuple[int, int, int]]:
    """[E, N, K] of one layer on one rank of tp x ep. Slices are padded to whole pairs of groups."""
    part = -(-INTERMEDIATE // tp // 64) * 64
    return {
        "w13": (EXPERTS // ep, 2 * part, HIDDEN),
        "w2": (EXPERTS // ep, HIDDEN, part),
    }


SHAPES = {
    **{f"tp{tp}": k3_shapes(tp=tp) for tp in (1, 2, 4, 8, 16, 32)},
    "ep8": k3_shapes(ep=8),
}


def random_experts(
    shape: tuple[int, int, int], device: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian weights in MXFP4 by the OCP rule (floor), with scales over a range of exponents."""
    e, n, k = shape
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.empty((e, n, k // 2), dtype=torch.uint8, device=device)
    scale = torch.empty((e, n, k // 32), dtype=torch.uint8, device=device)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
    for i in range(e):
        dense = torch.randn((n, k // 32, 32), generator=generator, device=device)
        exponent = torch.floor(torch.log2(dense.abs().amax(-1))) - 2
        codes = torch.bucketize(dense.abs() * torch.exp2(-exponent)[..., None], edges)
        codes = (codes + 8 * (dense < 0)).to(torch.uint8).view(n, k)
        weight[i] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        scale[i] = (exponent + 118).to(torch.uint8)
    return weight, scale


class Clock:
    """Times a call on a device, synchronized on both sides: (seconds, CPU seconds of all threads).
    On a machine that others use as well, the second is the one to compare."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def __call__(self, call: Callable[[], object]) -> tuple[float, float]:
        if not self.cuda:
            time.sleep(0.02)  # torch's idle threads spin for a while after their last work
            start, busy = time.perf_counter(), time.process_time()
            call()
            return time.perf_counter() - start, time.process_time() - busy
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, 0.0


def peak_extra(call: Callable[[], object], device: str) -> int:
    """Bytes allocated at most during the call, beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    status = Path("/proc/self/status")

    def resident() -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    before, done, peak = resident(), threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return max(0, peak - before)


def implementations(device: str) -> dict[str, Implementation]:
    """By the prefix of their variants' names; the fastest has none."""
    if device == "cuda":
        return {"": pick_implementation(torch.device(device))}
    if native_library.library() is None:
        print("this installation has no compiled code: torch only")
        return {"": LOOKUP}
    return {"": NATIVE, "lookup ": LOOKUP}


def verify(
    name: str, weight: torch.Tensor, scale: torch.Tensor, layout: str, work: Implementation
) -> None:
    """Both rules: bit-equal to the definition on three experts, to the lookup path on all, and the
    recipe to "absmax"; in place bit-equal to not in place."""

    def same(what: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not all(torch.equal(a, b) for a, b in pairs):
            raise SystemExit(f"{name}: {what} gives other bits; nothing was timed")

    def bits(scales: torch.Tensor) -> torch.Tensor:
        return scales.view(torch.int16)

    for rule in ("mse", "absmax"):
        fast = _convert(weight, scale, layout, rule, 8, False, False, work)
        per_expert = bits(fast.scale).view(len(weight), -1)
        for i in sorted({0, len(weight) // 2, len(weight) - 1}):
            part = slice(i, i + 1)
            slow = _convert(weight[part], scale[part], layout, rule, 8, False, False, NAIVE)
            same(
                f"{rule}, expert {i}, against the definition",
                (fast.weight[part], slow.weight),
                (per_expert[part].flatten(), bits(slow.scale).flatten()),
            )
        for i in range(0, len(weight), 8):
            part = slice(i, i + 8)
            other = _convert(weight[part], scale[part], layout, rule, 8, False, False, LOOKUP)
            same(
                f"{rule}, experts from {i}, against the lookup path",
                (fast.weight[part], other.weight),
                (per_expert[part].flatten(), bits(other.scale).flatten()),
            )
        if layout != "plain":
            placed = _convert(weight.clone(), scale, layout, rule, 8, True, False, work)
            same(
                f"{rule} in place",
                (fast.weight, placed.weight),
                (bits(fast.scale), bits(placed.scale)),
            )
    if layout == "aiter":
        few = slice(0, min(8, len(weight)))
        steps = convert_step_by_step(weight[few], scale[few])
        same("recipe", (steps[0], fast.weight[few]), (steps[1], fast.scale[: len(steps[1])]))


@dataclass
class Matrix:
    """Packed experts, the scales, and as many bytes again to convert in place."""

    weight: torch.Tensor
    scale: torch.Tensor
    spare: torch.Tensor

    def restore(self) -> None:
        self.spare.copy_(self.weight)


def variants_of(
    matrices: list[Matrix], every: dict[str, Implementation], layout: str
) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each works on one matrix after another and keeps all results."""

    def convert(work: Implementation, rule: str, in_place: bool) -> object:
        return [
            _convert(
                m.spare if in_place else m.weight, m.scale, layout, rule, 8, in_place, False, work
            )
            for m in matrices
        ]

    variants: dict[str, Callable[[], object]] = {"copy": lambda: [m.restore() for m in matrices]}
    for prefix, work in every.items():
        for rule in ("mse", "absmax"):
            variants[f"{prefix}{rule}"] = partial(convert, work, rule, False)
            if layout != "plain":
                variants[f"{prefix}{rule} in place"] = partial(convert, work, rule, True)
    variants["recipe"] = lambda: [convert_step_by_step(m.weight, m.scale) for m in matrices]
    return variants


def run_case(name: str, matrices: list[Matrix], args: argparse.Namespace) -> dict[str, object]:
    """Time every variant on one matrix, or on several one after another."""
    clock = Clock(args.device)
    variants = variants_of(matrices, implementations(args.device), args.layout)
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    for index in range(args.rounds + 1):
        for variant, call in variants.items():
            if variant == "recipe" and index > args.recipe_rounds:
                continue
            for matrix in matrices:
                matrix.restore()
            taken = clock(call)
            if index:
                times[variant].append(taken)
    packed = sum(m.weight.numel() for m in matrices)
    rows = {}
    for variant, call in variants.items():
        wall = spread([seconds for seconds, _ in times[variant]])
        rows[variant] = {
            "seconds": wall["median"],
            "quartiles": [wall["low"], wall["high"]],
            "cpu_seconds": statistics.median(busy for _, busy in times[variant]),
            "gigabytes_per_second": packed / wall["median"] / 1e9,
            "extra_bytes": peak_extra(call, args.device) if variant != "copy" else 0,
        }
    shapes = [[*m.weight.shape[:2], 2 * m.weight.shape[2]] for m in matrices]
    scales = sum(2 * m.scale.numel() for m in matrices)
    print(
        f"{name} {', '.join(map(str, shapes))}: {packed / 2**20:.0f} MiB, scales "
        f"{scales / 2**20:.0f}"
    )
    copy, recipe = rows["copy"], rows["recipe"]
    for variant, row in rows.items():
        row["times_copy"] = row["seconds"] / copy["seconds"]
        low, high = row["quartiles"]
        line = (
            f"  {variant:22} {row['seconds'] * 1e3:9.3f} ms ({low * 1e3:.3f}..{high * 1e3:.3f})  "
            f"{row['times_copy']:7.2f} x copy  {row['gigabytes_per_second']:8.3f} GB/s  "
            f"extra {row['extra_bytes'] / 2**20:.0f} MiB  "
        )
        busy = row["cpu_seconds"]
        if args.device == "cuda":
            line += f"recipe / this {recipe['seconds'] / row['seconds']:6.1f}"
        else:
            line += (
                f"CPU {busy * 1e3:.1f} ms, {packed / busy / 1e9:.3f} GB/s a core, "
                f"recipe / this {recipe['cpu_seconds'] / busy:6.1f}"
            )
        print(line)
    return {"shape": shapes, "packed_bytes": packed, "variants": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=device, metavar="cpu|cuda", default="cpu")
    parser.add_argument("--layout", choices=LAYOUTS, default="aiter")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=["tp8"],
        metavar="NAME",
        help=f"of {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--experts", type=positive, help="fewer experts than the shape's (CPU default: 16)"
    )
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--recipe-rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, help="CPU threads (torch's default otherwise)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=json_file, help="also write the figures here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    experts = args.experts or (16 if args.device == "cpu" else None)
    where = machine(torch.get_num_threads())
    if args.device == "cuda":
        where["device"] = torch.cuda.get_device_name()
    print(json.dumps(where))
    results = {}
    for group in args.shapes:
        matrices = {}
        for name, (e, n, k) in SHAPES[group].items():
            weight, scale = random_experts((min(e, experts or e), n, k), args.device, args.seed)
            fastest = implementations(args.device)[""]
            verify(f"{group} {name}", weight, scale, args.layout, fastest)
            matrices[name] = Matrix(weight, scale, weight.clone())
        for name, matrix in matrices.items():
            results[f"{group} {name}"] = run_case(f"{group} {name}", [matrix], args)
        both = f"{group} {' and '.join(matrices)}"
        results[both] = run_case(both, list(matrices.values()), args)
    write(args.json, "convert", where, results)


if __name__ == "__main__":
    main()
