# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3's experts on a CPU with packed int4 weights in the layout of AITER's gfx942 kernels.

They serve the int4 flag on a CPU, and they are the executable reference of what those kernels
compute: code times scale, rounded to the dtype of the activations. An expert is expanded when a
token of the batch is routed to it, and forgotten after.
"""

import torch

from mxfp4_int4.definition import GROUP_SIZE
from mxfp4_int4.layouts import gather_scales, unpack_codes
from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import CPUSituPackedExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kInt4Static32


def expand_int4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of one expert's weights in AITER's layout (see `mxfp4_int4.layouts`).

    Args:
        codes: ``[N, K / 2]`` uint8, two signed codes a byte.
        scales: ``N * K / 32`` bfloat16 in the order ``[K / 64, N, 2]``.
        dtype: of the result. float32 holds every value exactly; bfloat16 rounds each product of
            code and scale once, as the kernel does; float16 also rounds the scale.

    Returns:
        ``[N, K]``.
    """
    shape = (1, codes.shape[0], 2 * codes.shape[1])
    by_row = gather_scales(scales, "aiter", shape)[0].to(dtype)
    values = unpack_codes(codes, "aiter", shape)[0].to(dtype).view(*by_row.shape, GROUP_SIZE)
    return (values * by_row.unsqueeze(-1)).flatten(1)


class CPUSituInt4Experts(CPUSituPackedExperts):
    """SiTU experts with int4 weights, groups of 32 and bfloat16 scales, as AITER reads them."""

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return (weight_key, activation_key) == (kInt4Static32, None)

    def _expert(
        self, w1: torch.Tensor, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.w1_scale is None or self.w2_scale is None:
            raise ValueError("int4 experts: expected bfloat16 scales in the quant config")
        w13, down = (
            expand_int4(codes[expert], scales.view(codes.shape[0], -1)[expert], dtype)
            for codes, scales in ((w1, self.w1_scale), (w2, self.w2_scale))
        )
        return w13, down
