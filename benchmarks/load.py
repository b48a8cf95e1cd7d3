# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the account of a load costs, and what the expert index saves: stock beside overlay.

    python benchmarks/load.py             # 21,000 tensors, five rounds of three variants
    python benchmarks/load.py --headers   # Kimi-K3's 497,052 text tensors, without their bytes

Loads one checkpoint of real files through vLLM's own safetensors iterator, model and loaders, with
online FP8, on the CPU. Variants take turns, each in a process of its own; the files are in the page
cache after the first round, which is not counted. Times are CPU seconds of the load alone. Exit
code 1 unless all variants end with the same values.

With --headers, rank 0 of 8 of the full-size model on the meta device takes every tensor of the
"k3-shapes" preset: what is left of a load when moving bytes costs nothing. All variants must have
streamed the same tensors into the same parameters.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _options import json_file, positive
from _result import machine, spread, write

SIZES = (
    "--layers 5 --experts 896 --experts-per-token 16 --latent-size 128 --hidden-size 256 "
    "--expert-intermediate-size 256 --text-only --shards 8"
)
VARIANTS = ("stock", "account", "overlay")
RANKS = 8


def real_rows(config) -> int:
    """Return the rows of the merged KDA projection that a checkpoint holds, for one rank."""
    heads, dim = (config.linear_attn_config[key] for key in ("num_heads", "head_dim"))
    return 4 * heads * dim + dim + heads


def load(checkpoint: Path, variant: str) -> dict:
    """Load the checkpoint in this process."""
    import vllm_overlay

    vllm_overlay.activate(amendments=variant != "stock")
    import torch

    from k3_checkpoint import Checkpoint
    from kimi_k3.rehearsal.rank_model import rank_model
    from kimi_k3.rehearsal.ranks import FP8, Layout
    from vllm.model_executor.model_loader import expert_index
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    if variant == "account":
        expert_index.IndexedMapping.__iter__ = list.__iter__
    torch.set_num_threads(1)
    files = [str(file) for file in Checkpoint.open(checkpoint).files]
    with rank_model(checkpoint, Layout(1, linear=FP8), "cpu") as (model, config):
        count = 0

        def counted():
            nonlocal count
            for item in safetensors_weights_iterator(files, use_tqdm_on_load=False):
                count += 1
                yield item

        wall, cpu = time.perf_counter(), time.process_time()
        model.load_weights(counted())
        finalize_layerwise_processing(model, config.model_config)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        digest = hashlib.sha256()
        for name, parameter in sorted(model.named_parameters()):
            if ".in_proj_qkvgfab." in name:
                # Stock vLLM leaves alignment rows as it finds them. FP8 weights lie transposed.
                dim = 0 if name.endswith("_scale") else 1
                parameter = parameter.narrow(dim, 0, real_rows(config.model_config.hf_config))
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return {"tensors": count, "wall": wall, "cpu": cpu, "values": digest.hexdigest()}


def stream(checkpoint: Path, variant: str) -> dict:
    """Stream the checkpoint's headers through the loaders in this process."""
    import vllm_overlay

    vllm_overlay.activate(amendments=variant != "stock")
    from kimi_k3.rehearsal.ranks import FP8, Layout
    from kimi_k3.rehearsal.rehearse import rehearse

    found = rehearse(checkpoint, Layout(RANKS, linear=FP8), indexed=variant != "account")
    values = f"{found.tensors} {found.checkpoint_bytes} {found.plan.components}"
    return {
        "tensors": found.tensors,
        "wall": found.seconds,
        "cpu": found.cpu_seconds,
        "values": values,
    }


def run(checkpoint: Path, variant: str, headers: bool) -> dict:
    """Load it in a fresh process."""
    command = [sys.executable, __file__, "--child", variant, "--checkpoint", str(checkpoint)]
    command += ["--headers"] * headers
    environment = {**os.environ, "VLLM_KIMI_K3_OVERLAY": str(int(variant != "stock"))}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR"
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"error: {variant} failed:\n{process.stderr[-4000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Measure all variants and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headers", action="store_true", help="full size, no bytes")
    parser.add_argument("--rounds", type=positive, help="default: 5, with --headers 3")
    parser.add_argument("--json", type=json_file, help="also write the figures here")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        call = stream if arguments.headers else load
        print(json.dumps(call(arguments.checkpoint, arguments.child)))
        return
    sizes = "--preset k3-shapes" if arguments.headers else SIZES
    count = arguments.rounds or (3 if arguments.headers else 5)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        make = [str(Path(sys.executable).with_name("kimi-k3")), "make-checkpoint", str(checkpoint)]
        subprocess.run([*make, *sizes.split()], check=True, stdout=sys.stderr)
        rounds = [
            {variant: run(checkpoint, variant, arguments.headers) for variant in VARIANTS}
            for _ in range(count + 1)
        ][1:]
    values = {result["values"] for one in rounds for result in one.values()}
    tensors = rounds[0]["stock"]["tensors"]
    print(f"{tensors:,} tensors, {len(rounds)} rounds, values equal: {len(values) == 1}\n")
    print("| variant | CPU seconds, best | median | quartiles | of stock's, median |")
    print("| --- | ---: | ---: | ---: | ---: |")
    results = {}
    for variant in VARIANTS:
        cpu = [one[variant]["cpu"] for one in rounds]
        # Each round's variants run one after the other, so a busy machine slows them alike.
        shares = [one[variant]["cpu"] / one["stock"]["cpu"] for one in rounds]
        one = {"best": min(cpu), **spread(cpu), "of_stock": spread(shares)}
        results[variant] = one
        print(
            f"| {variant} | {one['best']:.3f} | {one['median']:.3f} | {one['low']:.3f}"
            f"..{one['high']:.3f} | {one['of_stock']['median']:.1%} |"
        )
    if len(values) != 1:
        raise SystemExit("error: the variants end with different values")
    found = {"tensors": tensors, "headers_only": arguments.headers, "variants": results}
    write(arguments.json, "load", machine(threads=1), found)


if __name__ == "__main__":
    main()
