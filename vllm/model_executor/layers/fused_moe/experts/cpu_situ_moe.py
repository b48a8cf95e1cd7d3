# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3's experts on a CPU, in torch: SiTU activation, plain or MXFP4 weights.

Upstream's CPU kernels know SiLU and its kin only. These classes take their place in upstream's
choice of kernels, after all of upstream's own, and for the SiTU activation alone. MXFP4 weights
stay packed; an expert is expanded when a token of the batch is routed to it, and forgotten after.
"""

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from mxfp4_int4.definition import GROUP_SIZE
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp4Static
from vllm.platforms import current_platform

# OCP MX specification 1.0: the eight magnitudes of e2m1; code bit 3 is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def situ(x: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """SiTU-GLU, ``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``.

    Args:
        x: ``[T, 2 I]``: gate beside up.
        beta: soft bound of the gate (K3: 4.0).
        linear_beta: soft bound of up (K3: 25.0); None leaves up as it is.

    Returns:
        ``[T, I]`` in the dtype of ``x``; arithmetic is float32.

    """
    gate, up = x.float().chunk(2, dim=-1)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype)


def expand_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of packed MXFP4 weights.

    Args:
        codes: ``[N, K / 2]`` uint8, two e2m1 codes a byte, the low nibble first.
        scales: ``[N, K / 32]`` uint8, e8m0.
        dtype: of the result. bfloat16 and float32 hold every value but 6 * 2^127 exactly.

    Returns:
        ``[N, K]``.

    """
    pairs = _byte_values(dtype, codes.device)[codes.int()]
    values = pairs.view(codes.shape[0], -1, GROUP_SIZE)
    return (values * scales.view(torch.float8_e8m0fnu).to(dtype).unsqueeze(-1)).flatten(1)


def _byte_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The two values of every byte, ``[256, 2]``."""
    magnitudes = torch.tensor(_E2M1, dtype=dtype, device=device)
    codes = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device=device)
    return codes[torch.stack([byte & 15, byte >> 4], dim=-1)]


class CPUSituExperts(mk.FusedMoEExpertsModular):
    """SiTU experts with float32, bfloat16 or float16 weights."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Activations are never quantized."""
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Tokens come as ``[T, K]``, not sorted by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SITU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return (weight_key, activation_key) == (None, None)

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces; the output is ``[T, K]``, already weighted and summed."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to weight or to sum."""
        return TopKWeightAndReduceNoOP()

    def _expert(
        self, w1: torch.Tensor, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights ``[2 I, K]`` and ``[K, I]`` of one local expert."""
        return w1[expert].to(dtype), w2[expert].to(dtype)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Run every expert that a token of the batch is routed to.

        Args:
            output: ``[T, K]``, written.
            hidden_states: ``[T, K]``.
            w1: ``[E, 2 I, K]`` (packed: ``K / 2`` bytes), gate rows before up rows.
            w2: ``[E, K, I]`` (packed: ``I / 2`` bytes).
            topk_weights: ``[T, top_k]``.
            topk_ids: ``[T, top_k]``, global expert ids.
            expert_map: ``[global experts]``, local id or -1; None where all experts are local.
            apply_router_weight_on_input: must be False. What is not listed is not used.

        Raises:
            NotImplementedError: router weights belong on the input.
        """
        if apply_router_weight_on_input:
            raise NotImplementedError(
                "SiTU experts on a CPU weight their outputs; found apply_router_weight_on_input"
            )
        beta = self.moe_config.activation_situ_beta or 1.0
        linear_beta = self.moe_config.activation_situ_linear_beta
        local_ids = topk_ids.long()
        if expert_map is not None:
            local_ids = expert_map.long()[local_ids]
        # Sums of up to top_k terms in float32, so that bfloat16 rounds once.
        total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        for expert in torch.unique(local_ids).tolist():
            if expert < 0:
                continue
            tokens, slots = torch.where(local_ids == expert)
            w13, w2_expert = self._expert(w1, w2, expert, hidden_states.dtype)
            hidden = situ(hidden_states[tokens] @ w13.T, beta, linear_beta)
            result = (hidden @ w2_expert.T).float()
            total.index_add_(0, tokens, result * topk_weights[tokens, slots].float().unsqueeze(1))
        output.copy_(total)


class CPUSituPackedExperts(CPUSituExperts):
    """SiTU experts whose weights hold two codes a byte, whatever the codes mean."""

    def moe_problem_size(
        self,
        a1: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> tuple[int, int, int, int, int]:
        """Experts, tokens, rows of w13, hidden size and top_k."""
        return w1.shape[0], a1.shape[0], w1.shape[1], a1.shape[-1], topk_ids.shape[1]


class CPUSituMxfp4Experts(CPUSituPackedExperts):
    """SiTU experts with MXFP4 weights as the checkpoint holds them."""

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return (weight_key, activation_key) == (kMxfp4Static, None)

    def _expert(
        self, w1: torch.Tensor, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.w1_scale is None or self.w2_scale is None:
            raise ValueError("MXFP4 experts: expected e8m0 scales in the quant config, found none")
        return (
            expand_mxfp4(w1[expert], self.w1_scale[expert], dtype),
            expand_mxfp4(w2[expert], self.w2_scale[expert], dtype),
        )
