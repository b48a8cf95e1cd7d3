# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3 on a CPU with its MXFP4 experts, beside the same checkpoint with int4 experts.

    python benchmarks/serve_cpu.py              # the "small" preset, 258 MB

Starts one engine of each kind and drives them in turn, so that every round pairs them. Before
anything is timed the expert weights that each engine holds are compared, byte for byte, with the
checkpoint's (MXFP4) and with their conversion (int4). The greedy token after the prefill must be
the same in every round; in the decode requests join the batch as they arrive, which moves bfloat16
sums and may swap near-equal tokens. The checkpoint's files are in the page cache.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _options import json_file, positive
from _result import machine, spread, write
from rich.console import Console
from rich.table import Table

VARIANTS = ("mxfp4", "int4")
MEASURES = ("prefill", "decode")
READY = "ready: "
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The weights are looked at by a function that is sent to the engine's process.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    # The few functions that upstream compiles take longer to compile than the run takes.
    "TORCHDYNAMO_DISABLE": "1",
}


def digest(parts: Any) -> str:
    """A checksum of tensors' bytes."""
    import torch

    found = hashlib.sha256()
    for tensor in parts:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def held_experts(model: Any) -> dict[int, str]:
    """Layer number -> checksum of the weights and scales of its experts. Runs in the engine."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith(".routed_experts"):
            names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
            parts = [getattr(module, part) for part in names]
            layer = re.search(r"\.layers\.(\d+)\.", f".{name}.")
            found[int(layer[1]) if layer else -1] = digest(parts)
    return found


def expected_experts(folder: Path, variant: str) -> dict[int, str]:
    """The same from the checkpoint's files."""
    import torch
    from safetensors import safe_open

    from k3_checkpoint import Checkpoint
    from mxfp4_int4 import convert_experts

    experts: dict[int, dict[tuple[str, str], dict[int, torch.Tensor]]] = {}
    pattern = re.compile(r"\.layers\.(\d+)\..*\.experts\.(\d+)\.(w[123])\.weight_(packed|scale)$")
    for file in Checkpoint.open(folder).files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.offset_keys():
                if match := pattern.search(name):
                    place = experts.setdefault(int(match[1]), {})
                    tensors = place.setdefault((match[3], match[4]), {})
                    tensors[int(match[2])] = shard.get_tensor(name)
    found = {}
    for layer, tensors_by_part in experts.items():
        stacked = {
            part: torch.stack([tensors[i] for i in sorted(tensors)])
            for part, tensors in tensors_by_part.items()
        }
        parts = []
        for names in (("w1", "w3"), ("w2",)):
            weight, scale = (
                torch.cat([stacked[name, kind] for name in names], dim=1)
                for kind in ("packed", "scale")
            )
            if variant == "int4":
                converted = convert_experts(weight, scale, layout="aiter")
                weight, scale = converted.weight, converted.scale
            parts += [weight, scale]
        found[layer] = digest(parts)
    return found


def serve(folder: Path, variant: str, options: argparse.Namespace) -> None:
    """Child: start the engine, check its weights, then serve a round for every line of input."""
    # By its module's name, under which the engine's process finds it; here it is __main__'s.
    from serve_cpu import held_experts as held_in_engine

    from vllm import LLM, SamplingParams

    extra = {"quantization_config": {"moe": {"weight": "int4_per_group_32"}}}
    start = time.perf_counter()
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        max_model_len=1024,
        max_num_seqs=options.sequences,
        disable_log_stats=True,
        **(extra if variant == "int4" else {}),
    )
    load = time.perf_counter() - start
    if llm.apply_model(held_in_engine) != [expected_experts(folder, variant)]:
        raise SystemExit(f"{variant}: the engine's experts differ from the checkpoint's")

    def generate(count: int, length: int, tokens: int) -> tuple[float, list[list[int]]]:
        prompts = [
            {"prompt_token_ids": [(31 * i + 7 * j) % 499 for j in range(length)]}
            for i in range(count)
        ]
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]

    print(READY + json.dumps({"start": load}), flush=True)
    for _ in sys.stdin:
        prefill, first = generate(1, options.prompt, 1)
        decode, _ = generate(options.sequences, 4, options.tokens)
        found = {"prefill": prefill, "decode": decode, "token": first[0][0]}
        print(READY + json.dumps(found), flush=True)


class Engine:
    """A child process with one engine."""

    def __init__(self, folder: Path, variant: str, arguments: list[str]) -> None:
        self.variant = variant
        command = [sys.executable, __file__, *arguments, "--child", variant]
        self.process = subprocess.Popen(
            [*command, "--checkpoint", str(folder)],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start = self._answer()["start"]

    def _answer(self) -> dict[str, Any]:
        output = self.process.stdout
        for line in output or ():
            if line.startswith(READY):
                return json.loads(line.removeprefix(READY))
        raise SystemExit(f"error: the engine with {self.variant} experts ended; see above")

    def round(self) -> dict[str, Any]:
        """Serve the same requests once."""
        if self.process.stdin is None:
            raise RuntimeError("the child has no standard input")
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """Let the child end by itself."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def measure(folder: Path, options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Run all rounds. The first, which is not counted, warms caches and allocators."""
    engines = []
    try:
        for variant in VARIANTS:
            engines.append(Engine(folder, variant, arguments))
        rounds = [
            {engine.variant: engine.round() for engine in engines}
            for _ in range(options.rounds + 1)
        ]
    finally:
        for engine in engines:
            engine.stop()
    for variant in VARIANTS:
        tokens = {one[variant]["token"] for one in rounds}
        if len(tokens) > 1:
            raise SystemExit(f"error: {variant} answers {sorted(tokens)} to the same prompt")
    results: dict[str, Any] = {engine.variant: {"start": engine.start} for engine in engines}
    for variant in VARIANTS:
        for what in MEASURES:
            results[variant][what] = spread([one[variant][what] for one in rounds[1:]])
    results["mxfp4 / int4"] = {
        what: spread([one["mxfp4"][what] / one["int4"][what] for one in rounds[1:]])
        for what in MEASURES
    }
    return results


def show(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Print one table: medians, quartiles in brackets."""
    table = Table(title=f"Kimi-K3 ({options.preset}) on a CPU, {options.rounds} rounds, bfloat16")
    prefill = f"prefill of {options.prompt} tokens"
    decode = f"decode, {options.sequences} sequences x {options.tokens}"
    for column in ("experts", "start", prefill, "tokens/s", decode, "tokens/s"):
        table.add_column(column, justify="right")
    tokens = {"prefill": options.prompt, "decode": options.sequences * options.tokens}
    for variant in VARIANTS:
        cells = [variant, f"{results[variant]['start']:.1f} s"]
        for what in MEASURES:
            one = results[variant][what]
            low, middle, high = (1e3 * one[key] for key in ("low", "median", "high"))
            cells += [f"{middle:.0f} ms ({low:.0f}..{high:.0f})"]
            cells += [f"{tokens[what] / one['median']:.0f}"]
        table.add_row(*cells)
    Console().print(table)
    for what, one in results["mxfp4 / int4"].items():
        print(
            f"{what}: MXFP4 takes {one['median']:.2f} x the time of int4 "
            f"({one['low']:.2f}..{one['high']:.2f})"
        )


def main() -> None:
    """Measure both and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small", help="of kimi-k3 make-checkpoint")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of the prefill")
    parser.add_argument("--sequences", type=positive, default=8, help="decoded at a time")
    parser.add_argument("--tokens", type=positive, default=24, help="decoded of each sequence")
    parser.add_argument("--threads", type=positive, default=1, help="of each engine")
    parser.add_argument("--json", type=json_file, help="also write the figures here")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.checkpoint, options.child, options)
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        make = [str(Path(sys.executable).with_name("kimi-k3")), "make-checkpoint", str(checkpoint)]
        subprocess.run([*make, "--preset", options.preset], check=True, stdout=sys.stderr)
        results = measure(checkpoint, options, sys.argv[1:])
    show(results, options)
    write(options.json, "serve_cpu", machine(options.threads), results)


if __name__ == "__main__":
    main()
