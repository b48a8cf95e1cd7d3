# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the account of a load costs, and what the expert index saves: stock beside overlay.

    python benchmarks/load.py             # 21,000 tensors, five rounds of three variants

Loads one checkpoint of real files through vLLM's own safetensors iterator, model and loaders, with
online FP8, on the CPU. Variants take turns, each in a process of its own; the files are in the page
cache after the first round, which is not counted. Times are CPU seconds of the load alone. Exit
code 1 unless all variants end with the same values.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (
    "--layers 5 --experts 896 --experts-per-token 16 --latent-size 128 --hidden-size 256 "
    "--expert-intermediate-size 256 --text-only --shards 8"
)
VARIANTS = ("stock", "account", "overlay")


def real_rows(config) -> int:
    """Return the rows of the merged KDA projection that a checkpoint holds, for one rank."""
    heads, dim = (config.linear_attn_config[key] for key in ("num_heads", "head_dim"))
    return 4 * heads * dim + dim + heads


def load(checkpoint: Path, variant: str) -> dict:
    """Load the checkpoint in this process."""
    import vllm_overlay

    vllm_overlay.activate(amendments=variant != "stock")
    import torch

    from vllm.entrypoints.kimi_k3.rehearsal.layout import FP8, Layout, rank_model
    from vllm.model_executor.model_loader import expert_index
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    if variant == "account":
        expert_index.IndexedMapping.__iter__ = list.__iter__
    torch.set_num_threads(1)
    files = sorted(str(file) for file in checkpoint.glob("*.safetensors"))
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


def run(checkpoint: Path, variant: str) -> dict:
    """Load it in a fresh process."""
    command = [sys.executable, __file__, "--child", variant, "--checkpoint", str(checkpoint)]
    environment = {**os.environ, "VLLM_KIMI_K3_OVERLAY": str(int(variant != "stock"))}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR"
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"error: {variant} failed:\n{process.stderr[-4000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Measure all variants and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(load(arguments.checkpoint, arguments.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        make = [str(Path(sys.executable).with_name("kimi-k3")), "make-checkpoint", str(checkpoint)]
        subprocess.run([*make, *SIZES.split()], check=True, stdout=sys.stderr)
        rounds = [
            {variant: run(checkpoint, variant) for variant in VARIANTS}
            for _ in range(arguments.rounds + 1)
        ][1:]
    values = {result["values"] for one in rounds for result in one.values()}
    cpu = {variant: [one[variant]["cpu"] for one in rounds] for variant in VARIANTS}
    # Each round's variants run one after the other, so a busy machine slows them alike.
    shares = {v: [one[v]["cpu"] / one["stock"]["cpu"] for one in rounds] for v in VARIANTS}
    tensors = rounds[0]["stock"]["tensors"]
    print(f"{tensors:,} tensors, {len(rounds)} rounds, values equal: {len(values) == 1}\n")
    print("| variant | CPU seconds, best | median | of stock's, median |")
    print("| --- | ---: | ---: | ---: |")
    for variant, seconds in cpu.items():
        share = statistics.median(shares[variant])
        print(
            f"| {variant} | {min(seconds):.3f} | {statistics.median(seconds):.3f} | {share:.1%} |"
        )
    if len(values) != 1:
        raise SystemExit("error: the variants end with different values")


if __name__ == "__main__":
    main()
