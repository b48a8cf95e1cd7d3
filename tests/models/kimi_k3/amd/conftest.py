# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Real KDA layers at one rank of a simulated layout, and checkpoint tensors to load into them."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from kimi_k3.rehearsal.simulated import simulated_parallel
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.models.kimi_k3.amd import kda
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.utils.torch_utils import set_default_torch_dtype

HEAD_DIM = 128
HIDDEN = 64
# The GPU where there is one, so that the same tests check the loading on real hardware.
DEVICE = torch.device("cuda" if current_platform.is_cuda_alike() else "cpu")
PREFIX = "model.layers.0.self_attn"
SHARDS = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")


@dataclass
class Rank:
    """One rank's real KDA layer and what its projection must hold.

    Attributes:
        layer: The `KimiK3DeltaAttention`.
        heads, tp, rank: Where it stands.
        real_rows: Rows that a checkpoint holds for this rank.
        padding: Alignment rows, by the rule "up to a multiple of 16".
    """

    layer: kda.KimiK3DeltaAttention
    heads: int
    tp: int
    rank: int

    @property
    def projection(self) -> torch.nn.Module:
        return self.layer.in_proj_qkvgfab

    @property
    def real_rows(self) -> int:
        return 4 * self.heads * HEAD_DIM // self.tp + HEAD_DIM + self.heads // self.tp

    @property
    def padding(self) -> int:
        return -self.real_rows % 16

    def sources(self, seed: int = 0) -> list[torch.Tensor]:
        """Return the six checkpoint tensors, whole, bf16, small integers.

        Sums of 64 products of such integers are exact in float32, in whatever order they are added.
        """
        generator = torch.Generator().manual_seed(seed)
        wide = self.heads * HEAD_DIM
        rows = (wide, wide, wide, wide, HEAD_DIM, self.heads)
        return [
            torch.randint(-8, 9, (n, HIDDEN), generator=generator, device="cpu")
            .to(torch.bfloat16)
            .to(DEVICE)
            for n in rows
        ]

    def expected(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's real rows, cut out of the sources by hand."""
        parts = []
        for shard, source in enumerate(sources):
            size = len(source) if shard == 4 else len(source) // self.tp
            start = 0 if shard == 4 else self.rank * size
            parts.append(source[start : start + size])
        return torch.cat(parts)

    def load(
        self, sources: list[torch.Tensor], order: list[int]
    ) -> Iterator[tuple[int, weakref.ref]]:
        """Load shards in `order`; yield each id and a weak reference to the source just given."""
        param = dict(self.projection.named_parameters())["weight"]
        for shard in order:
            source = sources[shard].clone()
            reference = weakref.ref(source)
            param.weight_loader(param, source, shard)
            del source
            yield shard, reference


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    with DEVICE:
        yield


@pytest.fixture
def rank_of(monkeypatch) -> Callable[..., contextmanager]:
    """Return a context that builds a `Rank`: ``with rank_of(heads=96, tp=8, rank=7) as rank``."""
    if not current_platform.is_rocm():
        # Both ask for a ROCm GPU.
        for name in ("is_fused_kda_decode_supported", "is_fused_kda_chunk_supported"):
            monkeypatch.setattr(kda, name, lambda *args: False)

    @contextmanager
    def build(*, heads: int, tp: int = 8, rank: int = 0, online: str | None = None, quant=None):
        config = KimiLinearConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            linear_attn_config={
                "kda_layers": [1],
                "full_attn_layers": [],
                "head_dim": HEAD_DIM,
                "num_heads": heads,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
        )
        vllm_config = VllmConfig()
        vllm_config.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_config=config)
        if online:
            quant = OnlineQuantizationConfig(QuantizationConfigArgs(linear={"weight": online}))
        vllm_config.quant_config = quant
        with (
            simulated_parallel(tensor_parallel_size=tp, rank=rank),
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(torch.bfloat16),
        ):
            layer = kda.KimiK3DeltaAttention(config, vllm_config, prefix=PREFIX)
            for module in layer.modules():
                # Only the CPU platform repacks a loaded weight, and then drops it.
                module._cpu_skip_gemm_dispatch = True
            yield Rank(layer, heads, tp, rank)

    return build


@pytest.fixture
def stock(monkeypatch) -> None:
    """Take the amendment off: the projection is built from the shared class again."""
    shared = kda._PaddedKimiGDNMergedColumnParallelLinear.__base__
    monkeypatch.setattr(kda, "_KimiGDNMergedColumnParallelLinear", shared)


@pytest.fixture
def poisoned_memory(monkeypatch) -> None:
    """Fill all memory that layerwise loading materializes: NaN, or the largest integer."""
    empty_strided = torch.empty_strided

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty_strided(*args, **kwargs)
        if tensor.is_meta:
            return tensor
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty_strided", poisoned)
