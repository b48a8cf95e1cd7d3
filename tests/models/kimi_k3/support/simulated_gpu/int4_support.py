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
from simulated_gpu import ARCHITECTURES, pretend, rocm_module

from vllm import _aiter_ops
from vllm.config import VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed.simulated import simulated_parallel
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
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
    quant: type[Mxfp4Config] = Mxfp4Config,
) -> RoutedExperts:
    """A real layer of MXFP4 experts; sizes are those over all ranks."""
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
