# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How long the experts of a whole model take: layers of full size, one after another, in place.

    python benchmarks/convert_layers.py --device cuda               # eight layers of a TP8 rank
    python benchmarks/convert_layers.py                             # CPU, fewer experts

Each layer has its own weights, as in a load, and each call checks its input as always. Verifies
every layer first, against the conversion that is not in place; `convert.py` holds that one to the
definition. The time of a layer is that of the row divided by its length, and times 92 it is the
model's. A copy of the same bytes, layer by layer too, is timed in turn.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
from _options import device, json_file, positive
from _result import machine, spread, write
from convert import SHAPES, Clock, random_experts

from mxfp4_int4 import convert_experts

LAYERS = 92  # with routed experts, in Kimi-K3
RULES = ("mse", "absmax")


class Row:
    """Layers in memory, and the MXFP4 bytes they can be set back to."""

    def __init__(self, name: str, layers: int, experts: int | None, device: str) -> None:
        self.sources = [
            random_experts((min(e, experts or e), n, k), device, seed)
            for seed in range(layers)
            for e, n, k in SHAPES[name].values()
        ]
        self.places = [weight.clone() for weight, _ in self.sources]

    def copy(self) -> None:
        for place, (weight, _) in zip(self.places, self.sources, strict=True):
            place.copy_(weight)

    def convert(self, rule: str) -> list[torch.Tensor]:
        """In place; returns the new scales."""
        return [
            convert_experts(place, scale, layout="aiter", scale_rule=rule, in_place=True).scale
            for place, (_, scale) in zip(self.places, self.sources, strict=True)
        ]

    def verify(self, rule: str) -> None:
        self.copy()
        scales = self.convert(rule)
        for i, (weight, scale) in enumerate(self.sources):
            fresh = convert_experts(weight, scale, layout="aiter", scale_rule=rule)
            if not torch.equal(fresh.weight, self.places[i]) or not torch.equal(
                fresh.scale.view(torch.int16), scales[i].view(torch.int16)
            ):
                raise SystemExit(f"tensor {i}, {rule}: other bits in place; nothing was timed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=device, metavar="cpu|cuda", default="cpu")
    parser.add_argument("--shapes", choices=SHAPES, default="tp8")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--experts", type=positive, help="fewer than the shape's (CPU default: 16)")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--json", type=json_file, help="also write the figures here")
    args = parser.parse_args()
    where = machine(torch.get_num_threads())
    if args.device == "cuda":
        where["device"] = torch.cuda.get_device_name()
    print(json.dumps(where))

    experts = args.experts or (16 if args.device == "cpu" else None)
    row = Row(args.shapes, args.layers, experts, args.device)
    for rule in RULES:
        row.verify(rule)
    variants: dict[str, Callable[[], object]] = {"copy": row.copy}
    variants |= {rule: partial(row.convert, rule) for rule in RULES}
    clock = Clock(args.device)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for index in range(args.rounds + 1):
        for variant, call in variants.items():
            row.copy()
            seconds, _ = clock(call)
            if index:
                times[variant].append(seconds / args.layers)
    results = {variant: spread(seconds) for variant, seconds in times.items()}
    packed = sum(weight.numel() for weight, _ in row.sources) / args.layers
    print(f"{args.shapes}, {args.layers} layers of {packed / 2**20:.0f} MiB in a row:")
    for variant, found in results.items():
        print(
            f"  {variant:8} {found['median'] * 1e3:9.3f} ms a layer ({found['low'] * 1e3:.3f}.."
            f"{found['high'] * 1e3:.3f})  {found['median'] / results['copy']['median']:6.2f} x copy"
            f"  {LAYERS} layers: {found['median'] * LAYERS:.3f} s"
        )
    write(args.json, "convert_layers", where, results)


if __name__ == "__main__":
    main()
