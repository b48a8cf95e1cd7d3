# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A checkpoint with Kimi-K3's experts in packed int4 is served on the CPU platform and on gfx942.

Ledger
    What: `CompressedTensorsMoEMethod.get_moe_method` returns `PackedInt4MoEMethod` for SiTU experts
        in `pack-quantized` symmetric int4 with groups of 32, on the CPU platform and on gfx942 with
        AITER's fused MoE; on the CPU platform `Mxfp4MoEMethod` for those that a checkpoint keeps in
        MXFP4 beside them. With `--moe-backend flydsl` on gfx950 it refuses such SiTU experts.
    Why: on a CPU upstream has no experts for SiTU with either, and on gfx942 none but the
        emulation, which expands int4 to bfloat16, four times the memory. Its FlyDSL method looks at
        no activation and computes SiLU.
    How: wrap one static method; any other scheme, activation, GPU or `--moe-backend` goes to
        upstream as before.
    Upstream: https://github.com/vllm-project/vllm/pull/51546 (int4 in groups of 32 on a CPU,
        without SiTU), https://github.com/vllm-project/vllm/pull/44400 (the FlyDSL method); to file:
        [Bug][ROCm] FlyDSL W4A16 MoE computes SiLU for SiTU experts.
    Remove when: upstream's WNA16 experts support `MoEActivation.SITU` on both.
"""

from typing import Any

from wrapt import patch_function_wrapper

from k3_checkpoint.formats import Format
from vllm.model_executor.layers.quantization.utils.k3_int4 import expert_format, facts
from vllm.platforms import current_platform
from vllm_overlay import require

require(
    f"{__name__}:CompressedTensorsMoEMethod.get_moe_method",
    parameters=("quant_config", "layer", "layer_name"),
)
_method = "vllm.model_executor.layers.quantization.mxfp4:Mxfp4MoEMethod"
_mxfp4_method = require(_method)
require(f"{_method}._build_moe_kernel", parameters=("self", "layer"))
require(f"{_method}.process_weights_after_loading", uses=("_setup_kernel_k3_situ_gfx942",))


@patch_function_wrapper(__name__, "CompressedTensorsMoEMethod.get_moe_method")
def _serve_int4(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    def choose(quant_config: Any, layer: Any, layer_name: str, *more: Any, **options: Any) -> Any:
        form = expert_format.expert_format(quant_config, layer, layer_name)
        if form is Format.INT4 and facts.find_packed_target(layer.moe_config.moe_backend):
            from vllm.model_executor.layers.quantization.utils.k3_int4 import packed_method

            return packed_method.PackedInt4MoEMethod(layer.moe_config)
        if form is Format.MXFP4 and current_platform.is_cpu():
            return _mxfp4_method(layer.moe_config)
        return wrapped(quant_config, layer, layer_name, *more, **options)

    return choose(*args, **kwargs)
