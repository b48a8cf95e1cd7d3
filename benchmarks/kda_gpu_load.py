# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3's 69 KDA layers loaded on a real GPU, stock vLLM and overlay in one run.

    python benchmarks/kda_gpu_load.py                      # 69 layers in FP8, 8 reloaded in bf16
    python benchmarks/kda_gpu_load.py --fastsafetensors 4  # also 4 layers from files, to the GPU

Real `KimiK3DeltaAttention` layers of rank 0 of 8, full-size sources on the GPU handed out one at a
time, and materialized memory filled with NaN, as memory is that was in use before. Held bytes are
counted from what layerwise loading itself keeps, beside the allocator's own figures. Exit code 1
unless values are equal in both, the overlay's alignment rows are zero, and it holds nothing.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from _options import device, positive

HEADS, HEAD_DIM, HIDDEN, TP = 96, 128, 7168, 8
SHARDS = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "g_proj": 3, "f_a_proj": 4, "b_proj": 5}
ROWS = (*(4 * [HEADS * HEAD_DIM]), HEAD_DIM, HEADS)
REAL_ROWS = 4 * HEADS * HEAD_DIM // TP + HEAD_DIM + HEADS // TP
GIB = 2**30


def source(layer: int, shard: int):
    """Return one full-size checkpoint tensor on the GPU, the same in every run."""
    import torch

    generator = torch.Generator("cuda").manual_seed(layer * len(ROWS) + shard)
    values = torch.randn(ROWS[shard], HIDDEN, generator=generator, device="cuda")
    return values.to(torch.bfloat16)


def from_memory(layers: int) -> Iterator:
    """Yield (layer, shard, tensor), one tensor alive at a time."""
    for layer in range(layers):
        for shard in range(len(ROWS)):
            yield layer, shard, source(layer, shard)


def from_files(layers: int) -> Iterator:
    """The same from real files, read to the GPU by fastsafetensors as vLLM drives it.

    By one process on its own: among several, each reads a share of the files for all.
    """
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        files = []
        for layer in range(layers):
            tensors = {f"{layer}.{name}": source(layer, i).cpu() for name, i in SHARDS.items()}
            files.append(str(Path(folder) / f"model-{layer:05d}.safetensors"))
            save_file(tensors, files[-1])
        loader = ParallelLoader(
            pg=SingleGroup(),
            hf_weights_files=files,
            queue_size=0,
            use_tqdm_on_load=False,
            device="cuda:0",
            nogds=True,
        )
        try:
            for name, tensor in loader.iterate_weights():
                layer, shard = name.split(".")
                yield int(layer), SHARDS[shard], tensor
        finally:
            loader.close()


def measure(kind: str, count: int) -> dict:
    """Load `count` layers in this process and return the figures."""
    import torch
    from torch import nn

    from kimi_k3.rehearsal.simulated import simulated_parallel
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.models.kimi_k3.amd import kda
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Both ask for a ROCm GPU; neither has to do with loading.
    kda.is_fused_kda_decode_supported = kda.is_fused_kda_chunk_supported = lambda *args: False
    attention = {
        "kda_layers": list(range(1, count + 1)),
        "full_attn_layers": [],
        "head_dim": HEAD_DIM,
        "num_heads": HEADS,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    config = KimiLinearConfig(
        hidden_size=HIDDEN, num_hidden_layers=count, linear_attn_config=attention
    )
    vllm_config = VllmConfig()
    vllm_config.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_config=config)
    if kind != "reload":
        vllm_config.quant_config = OnlineQuantizationConfig(
            QuantizationConfigArgs(linear={"weight": "fp8_per_channel_static"})
        )
    empty_strided = torch.empty_strided

    def poisoned(*args, **kwargs):
        tensor = empty_strided(*args, **kwargs)
        return tensor if tensor.is_meta else tensor.fill_(float("nan"))

    with (
        simulated_parallel(tensor_parallel_size=TP, rank=0),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("cuda"),
    ):
        layers = [
            kda.KimiK3DeltaAttention(config, vllm_config, prefix=f"model.layers.{i}.self_attn")
            for i in range(count)
        ]
        projections = nn.ModuleList(layer.in_proj_qkvgfab for layer in layers)
        if kind == "reload":
            reload.record_metadata_for_reloading(projections)
            reload.initialize_layerwise_reload(projections)
        torch.empty_strided = poisoned

        def held() -> int:
            return sum(
                value.nbytes
                for projection in projections
                for _, arguments in get_layerwise_info(projection).loaded_weights
                for value in arguments.arguments.values()
                if isinstance(value, torch.Tensor) and value.is_cuda
            )

        def resident() -> int:
            return sum(p.nbytes for p in projections.parameters() if p.is_cuda)

        base = torch.cuda.memory_allocated() - resident()
        peak = after = 0
        began = time.perf_counter()
        arrived = [0] * count
        weights = from_files(count) if kind == "files" else from_memory(count)
        for layer, shard, tensor in weights:
            torch.cuda.reset_peak_memory_stats()
            weight = projections[layer].weight
            weight.weight_loader(weight, tensor, shard)
            del tensor, weight
            peak = max(peak, torch.cuda.max_memory_allocated() - base - resident())
            arrived[layer] += 1
            if arrived[layer] == len(ROWS):
                after = max(after, held())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        figures = {
            "layers": count,
            "held_gib": held() / GIB,
            "held_after_a_layer_gib": after / GIB,
            "still_on_meta": sum(projection.weight.is_meta for projection in projections),
            "peak_beyond_resident_gib": peak / GIB,
            "seconds": seconds,
        }
        model_config = SimpleNamespace(dtype=torch.bfloat16)
        reload.finalize_layerwise_processing(projections, model_config)
        figures["resident_gib"] = resident() / GIB
        digest, nan, nonzero = hashlib.sha256(), 0, 0
        for projection in projections:
            weight = projection.weight
            rows = weight if weight.shape[1] == HIDDEN else weight.T
            scale = getattr(projection, "weight_scale", None)
            digest.update(rows[:REAL_ROWS].contiguous().view(torch.uint8).cpu().numpy().data)
            padding = rows[REAL_ROWS:].float()
            if scale is not None:
                digest.update(scale[:REAL_ROWS].contiguous().cpu().numpy().data)
                padding = padding * scale[REAL_ROWS:]
            nan += int(padding.isnan().sum())
            nonzero += int((padding != 0).sum())
        figures |= {"values": digest.hexdigest()[:16], "alignment_nan": nan}
        figures["alignment_nonzero"] = nonzero
    return figures


def run(kind: str, count: int, amended: bool) -> dict:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", kind, "--layers", str(count)]
    environment = {**os.environ, "VLLM_KIMI_K3_OVERLAY": str(int(amended))}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"error: {kind}, overlay {amended}, failed:\n{process.stderr[-4000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def proves(kind: str, stock: dict, overlay: dict) -> bool:
    """Tell whether one pair of runs shows the fix and equal values.

    The peak of a load from files counts the library's own buffers, a file each, so it has no bar.
    """
    return (
        stock["values"] == overlay["values"]
        and overlay["alignment_nonzero"] == overlay["alignment_nan"] == 0
        and stock["still_on_meta"] == stock["layers"]
        and overlay["still_on_meta"] == 0
        and overlay["held_after_a_layer_gib"] <= 0.01
        and (kind == "files" or overlay["peak_beyond_resident_gib"] <= 1.0)
    )


def main() -> None:
    """Run every pair, print Markdown and JSON, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=positive, default=69)
    parser.add_argument("--reload", type=positive, default=8, help="layers of the bf16 reload")
    parser.add_argument("--fastsafetensors", type=int, default=0, help="layers from files")
    parser.add_argument("--child", choices=("fp8", "reload", "files"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        import vllm_overlay

        vllm_overlay.activate(amendments=os.environ["VLLM_KIMI_K3_OVERLAY"] == "1")
        print(json.dumps(measure(arguments.child, arguments.layers)))
        return
    try:
        device("cuda")
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    jobs = {"fp8": arguments.layers, "reload": arguments.reload, "files": arguments.fastsafetensors}
    results: dict[str, dict[str, dict]] = {}
    print("| load | vLLM | layers | held (GiB) | peak beyond resident (GiB) | on meta | NaN | s |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for kind, count in jobs.items():
        if not count:
            continue
        results[kind] = {}
        for name, amended in (("stock", False), ("overlay", True)):
            figures = results[kind][name] = run(kind, count, amended)
            print(
                f"| {kind} | {name} | {count} | {figures['held_gib']:.4f} | "
                f"{figures['peak_beyond_resident_gib']:.3f} | {figures['still_on_meta']} | "
                f"{figures['alignment_nan']} | {figures['seconds']:.2f} |",
                flush=True,
            )
    print(json.dumps(results))
    if not all(proves(kind, pair["stock"], pair["overlay"]) for kind, pair in results.items()):
        raise SystemExit("error: the runs do not show the fix; see the figures above")


if __name__ == "__main__":
    main()
