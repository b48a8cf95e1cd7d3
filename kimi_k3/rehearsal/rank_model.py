# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One rank's real Kimi-K3 text model, at full size, on the meta device, with ROCm's size rules.

Builds; loads nothing. vLLM's own configuration, layers, loaders and size rules do everything. The
process stands at one rank of the layout without the others, and neither a GPU nor AITER is needed:
what asks for them is answered for the length of the context.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from kimi_k3.rehearsal.config import read_config
from kimi_k3.rehearsal.ranks import BF16, Layout
from kimi_k3.rehearsal.replaced import replaced
from kimi_k3.rehearsal.simulated import simulated_parallel
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import set_default_torch_dtype

kda = import_module("vllm.models.kimi_k3.amd.kda")
linear = import_module("vllm.models.kimi_k3.amd.linear")
model_configs = import_module("vllm.model_executor.models.config")
mxfp4_method = import_module("vllm.model_executor.layers.quantization.mxfp4")
mxfp4_oracle = import_module("vllm.model_executor.layers.fused_moe.oracle.mxfp4")

TEXT = "KimiLinearForCausalLM"


def vllm_config(folder: Path, layout: Layout) -> VllmConfig:
    """Return vLLM's configuration for a checkpoint in a layout, with "meta" as its load device."""
    ModelRegistry.register_model(TEXT, linear.KimiLinearForCausalLM)
    arguments: dict[str, Any] = {}
    if layout.linear != BF16:
        arguments["quantization_config"] = {"linear": {"weight": layout.linear}}
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        # Neither has to do with loading, and the CPU platform has rules of its own for both.
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        hf_overrides=_text_only,
        tensor_parallel_size=layout.tensor_parallel_size,
        enable_expert_parallel=layout.expert_parallel,
        **arguments,
    ).create_engine_config()
    config.load_config.device = "meta"
    return config


def _text_only(config: Any) -> Any:
    """Make a full model's configuration that of its text model."""
    text = getattr(config, "text_config", None)
    if text is None or text is config:
        return config
    text.architectures = [TEXT]
    return text


class _TextConfig(model_configs.KimiK3ForConditionalGenerationConfig):  # type: ignore[name-defined]
    """A text model's experts take the path of the full model's; serving is not prepared."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        pass


class _RocmPlatform:
    """vLLM's platform as the size rules see it: ROCm, and otherwise what it is."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_rocm(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def _rocm_stub() -> ModuleType:
    """Stand for `vllm.platforms.rocm`, which cannot be imported without a GPU: a CDNA3 one."""
    stub = ModuleType("vllm.platforms.rocm")
    stub.get_cdna_version = lambda: 3  # type: ignore[attr-defined]
    return stub


def _as_on_rocm(stack: ExitStack, layout: Layout) -> None:
    backend = mxfp4_oracle.Mxfp4MoeBackend
    chosen = backend.TRITON if layout.rounded else backend.AITER_MXFP4_BF16
    make_map = ExpertMapManager.__init__

    def never(*args: Any, **kwargs: Any) -> bool:
        return False

    def make_map_on_host(self: Any, *args: Any, **kwargs: Any) -> None:
        # It is no weight, and its entries are looked at while the model is built.
        with torch.device("cpu"):
            make_map(self, *args, **kwargs)

    for target, name, value in (
        (mxfp4_oracle, "current_platform", _RocmPlatform(mxfp4_oracle.current_platform)),
        # Kernels are chosen by what is installed; only the choice's size rule matters here.
        (mxfp4_method, "select_deepseek_v4_mxfp4_moe_backend", lambda moe: (chosen, None)),
        (ExpertMapManager, "__init__", make_map_on_host),
        (kda, "is_fused_kda_decode_supported", never),
        (kda, "is_fused_kda_chunk_supported", never),
    ):
        stack.enter_context(replaced(target, name, value))
    name = "vllm.platforms.rocm"
    if name not in sys.modules:
        sys.modules[name] = _rocm_stub()
        stack.callback(sys.modules.pop, name)


@contextmanager
def rank_model(
    folder: Path, layout: Layout, device: str = "meta"
) -> Iterator[tuple[nn.Module, VllmConfig]]:
    """Build the text model of one rank; within the context its loaders can be run.

    Args:
        folder: Holds config.json; weights are not looked at.
        layout: The rank and its layout.
        device: Where parameters lie; anything but "meta" takes their memory.

    Raises:
        ValueError: vLLM refuses the layout for this model.
    """
    with ExitStack() as stack:
        models = {**model_configs.MODELS_CONFIG_MAP, TEXT: _TextConfig}
        stack.enter_context(replaced(model_configs, "MODELS_CONFIG_MAP", models))
        _as_on_rocm(stack, layout)
        config = vllm_config(folder, layout)
        stack.enter_context(
            simulated_parallel(
                config,
                tensor_parallel_size=layout.tensor_parallel_size,
                rank=layout.rank,
                hosts=layout.hosts,
            )
        )
        loader = get_model_loader(config.load_config)
        dtype: Any = config.model_config.dtype
        with set_default_torch_dtype(dtype), torch.device(device):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
        yield model, config


def kda_layers(folder: Path) -> frozenset[int]:
    """Return the indices (from 0) of the layers with KDA, from config.json."""
    config = read_config(folder)
    text = config.get("text_config", config)
    return frozenset(index - 1 for index in text["linear_attn_config"]["kda_layers"])
