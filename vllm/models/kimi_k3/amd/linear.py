# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The portable Kimi-K3 text model on the CPU platform.

Ledger
    What: `attn_res` becomes the torch form; `KimiLinearForCausalLM.__init__` marks the layers
        whose weight the model reads by itself.
    Why: upstream's `attn_res` is a Triton kernel. And on a CPU, linear layers move their weight
        into a packed copy and leave `weight` empty, but the residual mixers and, with tensor
        parallelism, the latent up-projection are never called as layers: their weight is read.
    How: rebind one name; wrap one constructor and set upstream's own per-layer switch
        `_cpu_skip_gemm_dispatch`.
    Upstream: https://github.com/vllm-project/vllm/issues/52008 (Kimi-K3 on a CPU); to file: [CPU]
        Kimi-K3: attention residuals without Triton.
    Remove when: upstream's portable model serves a text request on the CPU platform.
"""

from typing import Any

from torch import nn
from wrapt import patch_function_wrapper

from vllm.platforms import current_platform
from vllm_overlay import require, stand_down

if not current_platform.is_cpu():
    stand_down("the platform is not the CPU", expected=True)

require(
    f"{__name__}:attn_res",
    parameters=(
        "prefix",
        "delta",
        "blocks",
        "norm_weight",
        "qk_weight",
        "output_norm_weight",
        "num_blocks",
        "block_write_idx",
        "eps",
        "output_norm_eps",
        "quant_dtype",
    ),
    exact=True,
)
require(f"{__name__}:_apply_attn_res", uses=("attn_res", "weight"))
require(
    f"{__name__}:KimiLinearForCausalLM.__init__",
    parameters=("self", "vllm_config", "prefix"),
)
require(
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
    parameters=("self", "layer"),
    uses=("dispatch_cpu_unquantized_gemm",),
)

from vllm.models.kimi_k3.cpu.attn_res import attn_res  # noqa: E402, F401

# Layers whose weight the model reads, so that it must stay where it is.
_READ_DIRECTLY = ("_res_proj", "routed_expert_up_proj")


def _mark_read_directly(model: nn.Module) -> None:
    """Let the layers of `model` whose weight is read keep it where it is."""
    for name, layer in model.named_modules():
        if name.endswith(_READ_DIRECTLY):
            layer._cpu_skip_gemm_dispatch = True


@patch_function_wrapper(__name__, "KimiLinearForCausalLM.__init__")
def _init_and_mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    _mark_read_directly(instance)
