# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which rank of which parallel layout a plan or a rehearsal is for."""

from dataclasses import dataclass

BF16, FP8 = "bf16", "fp8_per_channel_static"


@dataclass(frozen=True)
class Layout:
    """Which rank of which layout, and how linear layers are quantized while they load.

    Attributes:
        tensor_parallel_size: Ranks.
        rank: This one, from 0.
        expert_parallel: Whether whole experts are spread over the ranks instead of slices of each.
        linear: ``bf16`` for none, or a name of vLLM's online quantization.
        hosts: Machines that the ranks are spread over.
        rounded: Whether experts follow vLLM's general size rule for ROCm instead of the rule for
            AITER's SiTU kernel.
    """

    tensor_parallel_size: int
    rank: int = 0
    expert_parallel: bool = False
    linear: str = BF16
    hosts: int = 1
    rounded: bool = False
