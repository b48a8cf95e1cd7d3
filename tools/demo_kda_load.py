# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Loads a checkpoint's KDA layers as rank 0 of eight would: on stock vLLM and under the overlay.

    python tools/demo_kda_load.py            # a table; exit code 1 if it does not show the fix
    python tools/demo_kda_load.py --json     # the figures

The checkpoint is written by `kimi-k3 make-checkpoint`: real tensor names, real row counts, a
reduced hidden size. vLLM's own safetensors iterator, `KimiLinearModel.load_weights` and layerwise
processing with online FP8 load it into real `KimiK3DeltaAttention` layers. Each run has a process
of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAYERS, HEADS, HEAD_DIM, HIDDEN, TP = 6, 96, 128, 128, 8
SHARDS = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
# Kimi-K3's own, for what the held bytes would be there.
REAL_HIDDEN, REAL_LAYERS = 7168, 69
REAL_ROWS = 4 * HEADS * HEAD_DIM // TP + HEAD_DIM + HEADS // TP
ALIGNMENT_ROWS = -REAL_ROWS % 16


def load(checkpoint: Path, amended: bool) -> list[dict]:
    """Load the checkpoint's KDA layers in this process and return one record a layer."""
    import vllm_overlay

    vllm_overlay.activate(amendments=amended)
    import torch
    from torch import nn

    from k3_checkpoint import Checkpoint
    from kimi_k3.rehearsal.simulated import simulated_parallel
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
    from vllm.models.kimi_k3.amd import kda
    from vllm.models.kimi_k3.amd.linear import KimiLinearModel
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Both ask for a ROCm GPU; neither has to do with loading.
    kda.is_fused_kda_decode_supported = kda.is_fused_kda_chunk_supported = lambda *args: False
    # Fresh memory is often zero by luck. Here whatever is not written shows.
    empty_strided = torch.empty_strided

    def poisoned(*args, **kwargs):
        tensor = empty_strided(*args, **kwargs)
        return tensor if tensor.is_meta else tensor.fill_(float("nan"))

    torch.empty_strided = poisoned

    model_config = ModelConfig(model=str(checkpoint), skip_tokenizer_init=True)
    config = model_config.hf_config
    vllm_config = VllmConfig()
    vllm_config.model_config = model_config
    vllm_config.quant_config = OnlineQuantizationConfig(
        QuantizationConfigArgs(linear={"weight": "fp8_per_channel_static"})
    )

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.self_attn = kda.KimiK3DeltaAttention(
                config, vllm_config, prefix=f"model.layers.{index}.self_attn"
            )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.layers = nn.ModuleList(Layer(index) for index in range(config.num_hidden_layers))

    with (
        simulated_parallel(tensor_parallel_size=TP, rank=0),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(torch.bfloat16),
    ):
        model = Model()
        records = [
            {"layer": index, "shards": 0, "completed_at": None, "held_bytes": 0}
            for index in range(len(model.layers))
        ]

        def held(projection: nn.Module) -> int:
            return sum(
                value.nbytes
                for _, arguments in get_layerwise_info(projection).loaded_weights
                for value in arguments.arguments.values()
                if isinstance(value, torch.Tensor) and not value.is_meta
            )

        def attention_weights():
            files = [str(file) for file in Checkpoint.open(checkpoint).files]
            for name, tensor in safetensors_weights_iterator(files, use_tqdm_on_load=False):
                if ".self_attn." not in name:
                    continue
                name = name.removeprefix("model.")
                yield name, tensor
                # Here again when the loader has dealt with it and asks for the next one.
                del tensor
                _, index, _, shard, *_ = name.split(".")
                if shard not in SHARDS:
                    continue
                record, projection = (
                    records[int(index)],
                    model.layers[int(index)].self_attn.in_proj_qkvgfab,
                )
                record["shards"] += 1
                if record["completed_at"] is None and not projection.weight.is_meta:
                    record["completed_at"] = record["shards"]

        KimiLinearModel.load_weights(model, attention_weights())
        for record, layer in zip(records, model.layers, strict=True):
            record["held_bytes"] = held(layer.self_attn.in_proj_qkvgfab)
        finalize_layerwise_processing(model, model_config)
        for record, layer in zip(records, model.layers, strict=True):
            projection = layer.self_attn.in_proj_qkvgfab
            rows = (projection.weight.T.float() * projection.weight_scale)[REAL_ROWS:]
            record["alignment_rows"] = len(rows)
            record["alignment_zero"] = bool((rows == 0).all())
            record["alignment_nan"] = bool(rows.isnan().any())
    return records


def run(checkpoint: Path, amended: bool) -> list[dict]:
    """Load in a fresh process and return its records."""
    command = [sys.executable, __file__, "--child", str(checkpoint)]
    # vLLM would activate the overlay by itself; the stock run must not have it.
    environment = {**os.environ, "VLLM_KIMI_K3_OVERLAY": str(int(amended))}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"error: loading {checkpoint} failed:\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


def shows_the_fix(results: dict[str, list[dict]]) -> bool:
    """Tell whether stock holds every layer and the overlay none, with zero alignment rows."""
    stock, overlay = results["stock"], results["overlay"]
    return (
        all(r["completed_at"] is None and r["held_bytes"] and r["alignment_nan"] for r in stock)
        and all(r["completed_at"] == len(SHARDS) and r["alignment_zero"] for r in overlay)
        and not any(r["held_bytes"] for r in overlay)
    )


def show(results: dict[str, list[dict]]) -> None:
    """Print the table and what it means at full size."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        box=box.SIMPLE,
        title=f"KDA projections at TP{TP}: {REAL_ROWS} rows and {ALIGNMENT_ROWS} alignment rows",
    )
    for column in ("layer", "vLLM", "shards", "completed", "held (MiB)", "alignment rows"):
        table.add_column(column, justify="right" if column in ("layer", "held (MiB)") else "left")
    for stock, overlay in zip(results["stock"], results["overlay"], strict=True):
        for name, record in (("stock", stock), ("overlay", overlay)):
            done = record["completed_at"]
            table.add_row(
                str(record["layer"]) if name == "stock" else "",
                name,
                f"{record['shards']}/{len(SHARDS)}",
                f"at shard {done}" if done else "[red]held to the end[/]",
                f"{record['held_bytes'] / 2**20:.1f}",
                "zero" if record["alignment_zero"] else "[red]NaN[/]",
            )
    console.print(table)
    for name, records in results.items():
        held = sum(record["held_bytes"] for record in records)
        full = held / len(records) * REAL_LAYERS * REAL_HIDDEN / HIDDEN
        console.print(
            f"{name}: {held / 2**20:.1f} MiB of source tensors held at the end of the stream; "
            f"{full / 2**30:.2f} GiB at Kimi-K3's hidden size and {REAL_LAYERS} KDA layers."
        )


def main() -> None:
    """Run both loads, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        amended = os.environ["VLLM_KIMI_K3_OVERLAY"] == "1"
        print(json.dumps(load(arguments.child, amended)))
        return
    from rich.console import Console

    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        checkpoint = Path(folder) / "checkpoint"
        status.update("writing a checkpoint")
        sizes = {
            "--layers": LAYERS,
            "--heads": HEADS,
            "--head-dim": HEAD_DIM,
            "--hidden-size": HIDDEN,
            "--stack": "kda",
        }
        command = [str(Path(sys.executable).with_name("kimi-k3")), "make-checkpoint"]
        options = [word for pair in sizes.items() for word in map(str, pair)]
        subprocess.run(
            [*command, str(checkpoint), "--text-only", *options], check=True, stdout=sys.stderr
        )
        results = {}
        for name, amended in (("stock", False), ("overlay", True)):
            status.update(f"loading it, {name} vLLM")
            results[name] = run(checkpoint, amended)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)
    if not shows_the_fix(results):
        raise SystemExit("error: the runs do not show the fix; see the figures above")


if __name__ == "__main__":
    main()
