# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3 can be built where a rank's slice of an expert is smaller than the kernels' least size.

Ledger
    What: `ROCmLatentMoERunner` gains the properties `w13_weight` and `w2_weight`.
    Why: with 16 ranks and more an expert's slice (3072 / 16 = 192) is padded to 256, and `KimiMoE`
        then asks the runner for the weights in order to zero them. They belong to the runner's
        `routed_experts`, so the model ends with an AttributeError while it is being constructed.
    How: two read-only properties on the class.
    Upstream: https://github.com/vllm-project/vllm/issues/51124 (the same padding in NVIDIA's
        model); to file: [Bug][ROCm] Kimi-K3 at TP16: ROCmLatentMoERunner has no attribute
        w13_weight.
    Remove when: upstream's runner has `w13_weight`, or `KimiMoE` asks `routed_experts` for it.
"""

from vllm_overlay import require, stand_down

_runner = require(f"{__name__}:ROCmLatentMoERunner")
require("vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.__init__")

if hasattr(_runner, "w13_weight"):
    stand_down("upstream's runner finds its experts' weights")

_runner.w13_weight = property(lambda self: self.routed_experts.w13_weight)
_runner.w2_weight = property(lambda self: self.routed_experts.w2_weight)
