# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3's experts on a CPU with packed int4 weights in the layout of AITER's gfx942 kernels.

They serve the int4 flag on a CPU, and they are the executable reference of what those kernels
compute: code times scale, rounded to the dtype of the activations. An expert is expanded when a
token of the batch is routed to it, and forgotten after.
"""

from functools import cache

import torch

from vllm.model_executor.layers.fused_moe.experts.cpu_situ_moe import CPUSituExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kInt4Static32

_GROUP = 32
_ROWS = 16


@cache
def _byte_values(dtype: torch.dtype) -> torch.Tensor:
    """The two signed codes of every byte, low nibble first, ``[256, 2]``."""
    byte = torch.arange(256)
    nibbles = torch.stack([byte & 15, byte >> 4], dim=-1)
    return ((nibbles ^ 8) - 8).to(dtype)


def expand_int4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of one expert's weights in AITER's layout (see `mxfp4_int4.layouts`).

    Args:
        codes: ``[N, K / 2]`` uint8. Of each 16 rows: group of 32, half of it, row, two runs of 8
            values along K; a run v0..v7 is the four bytes ``v0|v4<<4 .. v3|v7<<4``.
        scales: ``N * K / 32`` bfloat16 in the order ``[K / 64, N, 2]``.
        dtype: of the result. float32 holds every value exactly; bfloat16 and float16 round each
            product of code and scale once, as the kernel does.

    Returns:
        ``[N, K]``.

    """
    rows, groups = codes.shape[0], 2 * codes.shape[1] // _GROUP
    runs = _byte_values(dtype)[codes.int()].view(rows // _ROWS, groups, 2, _ROWS, 2, 4, 2)
    # tile, group, half, row, run, byte, nibble -> tile, row, group, half, run, nibble, byte
    values = runs.permute(0, 3, 1, 2, 4, 6, 5).reshape(rows, groups, _GROUP)
    by_row = scales.view(groups // 2, rows, 2).permute(1, 0, 2).reshape(rows, groups, 1)
    return (values * by_row.to(dtype)).flatten(1)


class CPUSituInt4Experts(CPUSituExperts):
    """SiTU experts with int4 weights, groups of 32 and bfloat16 scales, as AITER reads them."""

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return (weight_key, activation_key) == (kInt4Static32, None)

    def moe_problem_size(
        self,
        a1: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> tuple[int, int, int, int, int]:
        """Experts, tokens, rows of w13, hidden size and top_k."""
        return w1.shape[0], a1.shape[0], w1.shape[1], a1.shape[-1], topk_ids.shape[1]

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
