# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Real MoE layers of Kimi-K3's kind at one rank, on a CPU or a simulated GPU, for int4 tests."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kimi_k3.rehearsal.simulated import simulated_parallel
from mxfp4_int4 import convert_experts
from tests.models.kimi_k3.support.simulated_gpu.simulated_gpu import (
    ARCHITECTURES,
    pretend,
    rocm_module,
)
from vllm import _aiter_ops
from vllm.config import VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype

SUPPORT = Path(__file__).parents[1]
STAND_IN = SUPPORT / "aiter_stand_in"
INT4 = "int4_per_group_32"
NAME = "model.layers.1.block_sparse_moe.experts"


@pytest.fixture
def on_gpu(monkeypatch) -> Iterator[Callable[..., None]]:
    """Simulate a GPU, with a build of the stand-in AITER or None."""

    def choose(architecture: str, aiter: str | None = "new", *, enabled: bool = True) -> None:
        pretend(architecture, CpuPlatform, monkeypatch.setattr)
        if architecture in ARCHITECTURES:
            rocm = rocm_module(architecture)
            monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", rocm)
        monkeypatch.setattr(_aiter_ops, "IS_AITER_FOUND", aiter is not None)
        monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "_AITER_ENABLED", enabled)
        monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "_FMOE_ENABLED", enabled)
        forget_aiter()
        if aiter is not None:
            monkeypatch.setenv("AITER_STAND_IN", aiter)
            monkeypatch.syspath_prepend(str(STAND_IN))

    yield choose
    forget_aiter()


def forget_aiter() -> None:
    """Let the next import of AITER find another build."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def make_config(weight: str | None, **changes) -> VllmConfig:
    """A configuration as layers see it while a model is built."""
    config = VllmConfig()
    moe = None if weight is None else {"weight": weight}
    args = (
        None if moe is None else QuantizationConfigArgs(moe=moe, ignore=changes.pop("ignore", []))
    )
    config.additional_config = changes.pop("additional_config", {})
    config.model_config = SimpleNamespace(
        quantization_config=args, dtype=torch.float32, is_moe=True, **changes
    )
    return config


@contextmanager
def rank_of(config: VllmConfig, tp: int = 1, rank: int = 0) -> Iterator[None]:
    """Stand at one rank, with float32 as the dtype of what is built."""
    with (
        simulated_parallel(config, tensor_parallel_size=tp, rank=rank),
        set_default_torch_dtype(torch.float32),
    ):
        yield


def build_layer(
    *,
    name: str = NAME,
    experts: int = 4,
    hidden: int = 256,
    inner: int = 384,
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
    activation: str = "situ",
    quant: Callable[[], QuantizationConfig] = Mxfp4Config,
) -> RoutedExperts:
    """A real layer of experts, MXFP4 ones by default; sizes are those over all ranks."""
    runner = FusedMoEFactory(
        num_experts=experts,
        top_k=2,
        hidden_size=hidden,
        intermediate_size=inner,
        activation=activation,
        activation_situ_beta=beta,
        activation_situ_linear_beta=linear_beta,
        quant_config=quant(),
        prefix=name,
        renormalize=True,
    )
    return runner.routed_experts


def fill(layer: RoutedExperts, seed: int = 0) -> dict[str, torch.Tensor]:
    """Give a layer random MXFP4 experts; return copies of what it holds."""
    g = torch.Generator().manual_seed(seed)
    held = {}
    for projection in ("w13", "w2"):
        weight = getattr(layer, f"{projection}_weight")
        scale = getattr(layer, f"{projection}_weight_scale")
        weight.data.copy_(torch.randint(0, 256, weight.shape, generator=g, dtype=torch.uint8))
        scale.data.copy_(torch.randint(112, 120, scale.shape, generator=g).byte())
        held[f"{projection}_weight"] = weight.data.clone()
        held[f"{projection}_weight_scale"] = scale.data.clone()
    return held


def packed_description(group: dict | None = None, **weights) -> dict:
    """What config.json says of packed int4 experts; changes are for what is not quite that."""
    described = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    described |= {"group_size": 32, "dynamic": False} | weights
    form = {"targets": ["Linear"], "format": "pack-quantized", "weights": described} | (group or {})
    return {
        "quant_method": "compressed-tensors",
        "format": form["format"],
        "config_groups": {"group_0": form},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }


def packed_quant(group: dict | None = None, **weights) -> CompressedTensorsConfig:
    """The engine's configuration of such a checkpoint."""
    return CompressedTensorsConfig.from_config(packed_description(group, **weights))


def draw_experts(experts: int, hidden: int, inner: int, seed: int = 0) -> list[dict]:
    """Random MXFP4 codes and scales of whole experts, as a checkpoint holds them."""
    g = torch.Generator().manual_seed(seed)

    def one(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (rows, width // 2), generator=g, dtype=torch.uint8)
        return codes, torch.randint(112, 120, (rows, width // 32), generator=g).byte()

    sizes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    return [{name: one(*size) for name, size in sizes.items()} for _ in range(experts)]


def pack(codes: torch.Tensor, scale: torch.Tensor, rule: str) -> dict[str, torch.Tensor]:
    """The three tensors that take the place of one MXFP4 projection, by suffix."""
    packed, scales, _ = convert_experts(
        codes[None], scale[None], layout="pack_quantized", scale_rule=rule
    )
    shape = torch.tensor([codes.shape[0], 2 * codes.shape[1]])
    return {"weight": packed[0], "weight_scale": scales[0], "weight_shape": shape}


def load(layer: RoutedExperts, expert: int, shard: str, tensors: dict[str, torch.Tensor]) -> None:
    """Hand tensors to a layer as the model's loader does."""
    for suffix, tensor in tensors.items():
        name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
        param = getattr(layer, name)
        param.weight_loader(
            param, tensor, f"{layer.layer_name}.{name}", shard_id=shard, expert_id=expert
        )


def load_experts(layer: RoutedExperts, experts: list[dict], rule: str | None = None) -> None:
    """Load whole experts, as MXFP4 or, with a scale rule, as packed int4."""
    for number, expert in enumerate(experts):
        for shard, (codes, scale) in expert.items():
            if rule is None:
                load(layer, number, shard, {"weight": codes, "weight_scale": scale})
            else:
                load(layer, number, shard, pack(codes, scale, rule))
