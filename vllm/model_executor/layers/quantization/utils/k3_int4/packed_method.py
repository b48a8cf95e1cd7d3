# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The MoE method of a checkpoint whose experts are packed int4 already.

It is the method of the online conversion, the same experts and the same kernel, but for the
parameters that a checkpoint is read into.
"""

from importlib import import_module
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts
from vllm.model_executor.layers.quantization.utils.k3_int4 import facts, packed, policy

_Upstream: Any = import_module("vllm.model_executor.layers.quantization.mxfp4").Mxfp4MoEMethod


class PackedInt4MoEMethod(_Upstream):
    """SiTU experts from `pack-quantized` int4 with groups of 32.

    Raises:
        Int4RefusedError: They cannot be computed here; the layer has no weights yet.
    """

    # Weights that another process has laid out come without a word about their layout.
    supports_pre_processed_weights = False

    def __init__(self, moe: FusedMoEConfig) -> None:
        with facts.building(policy.BY_CHECKPOINT):
            super().__init__(moe)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
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
