# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The entry point of the packed-int4 kernels, with or without the keyword that tells builds apart.

vLLM looks at its signature and calls `aiter.fused_moe.fused_moe`; so does this project.
"""

from aiter import BUILD

if BUILD == "without-act":

    def flydsl_a16w4_gemm1(*, a_bf16, w1_u8, w1_scale_u8, w_dtype="mxfp4"):
        """Stage 1 of an old build."""
        raise NotImplementedError

elif BUILD != "without-entry":

    def flydsl_a16w4_gemm1(*, a_bf16, w1_u8, w1_scale_u8, act="silu", w_dtype="mxfp4"):
        """Stage 1 of a new build."""
        raise NotImplementedError
