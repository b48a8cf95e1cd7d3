# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The MoE method of a checkpoint whose experts are packed int4 already.

From the loaded layer on it is the method of the online conversion: the same experts, the same
kernel, the same bytes. Only what comes before differs.
"""

import os
from importlib import import_module
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.utils.k3_int4 import aiter, packed, policy, report
from vllm.model_executor.layers.quantization.utils.k3_int4.policy import BY_CHECKPOINT, Target

logger = init_logger(__name__)
_backends = import_module("vllm.model_executor.layers.fused_moe.oracle.mxfp4")
_Upstream: Any = import_module("vllm.model_executor.layers.quantization.mxfp4").Mxfp4MoEMethod


class PackedInt4MoEMethod(_Upstream):
    """SiTU experts from `pack-quantized` int4 with groups of 32.

    Args:
        moe: of the layer.
        target: where they are computed.

    Raises:
        Int4RefusedError: They cannot be; the layer has no weights yet.
    """

    # Weights that another process has laid out come without a word about their layout.
    supports_pre_processed_weights = False

    def __init__(self, moe: FusedMoEConfig, target: Target) -> None:
        if target is Target.GFX942:
            aiter.check_entry_point(BY_CHECKPOINT)
        policy.check_layer(moe, target, BY_CHECKPOINT)
        # Not `Mxfp4MoEMethod.__init__`, which looks for a kernel for MXFP4.
        FusedMoEMethodBase.__init__(self, moe)
        from vllm.config import get_current_vllm_config

        self.weight_dtype = "int4"
        self.activation_key = None
        self.is_k3_situ_aiter = False
        # Upstream's switch for what follows the conversion; also that of the native sizes.
        self.is_k3_situ_int4_gfx942 = True
        self.target = target
        if target is Target.CPU:
            from vllm.model_executor.layers.fused_moe.experts import cpu_situ_int4_moe

            self.mxfp4_backend = _backends.Mxfp4MoeBackend.CPU
            self.experts_cls = cpu_situ_int4_moe.CPUSituInt4Experts
        else:
            self.mxfp4_backend = _backends.Mxfp4MoeBackend.AITER_MXFP4_BF16
            self.experts_cls = _backends.backend_to_kernel_cls(self.mxfp4_backend)[0]
            _keep_plain_activations()
        self.max_capture_size = moe.max_capture_size
        self.moe_kernel = None
        self.int4_report = report.report_for(get_current_vllm_config().model_config, None)
        self.int4_report.awaited += 1
        logger.info_once(
            "Kimi-K3's experts are packed int4 in the checkpoint; they are laid out for %s as they "
            "are, without a conversion.",
            self.experts_cls.__name__,
        )

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Register the parameters that the checkpoint is read into."""
        layer.params_dtype = params_dtype
        layer.num_experts = num_experts
        packed.register(
            layer,
            self.moe,
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            extra_weight_attrs["weight_loader"],
        )

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Lay the experts out for the kernel and build it."""
        dtype = torch.uint8 if self.target is Target.CPU else aiter.weight_dtype()
        record = packed.repack_layer(layer, self.moe, dtype)
        self._build_moe_kernel(layer)
        self.int4_report.record(layer.layer_name, record)


def _keep_plain_activations() -> None:
    """As upstream does for these kernels: no bound above which AITER takes FP8 activations."""
    from vllm._aiter_ops import rocm_aiter_ops

    if rocm_aiter_ops.is_fused_moe_situv2_enabled():
        os.environ["AITER_BF16_FP8_MOE_BOUND"] = "0"
