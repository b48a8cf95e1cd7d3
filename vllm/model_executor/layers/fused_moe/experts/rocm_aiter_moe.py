# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""AITER's experts accept the int4 weights that vLLM 0.32 converts for them on gfx942.

Ledger
    What: `AiterExperts._supports_quant_scheme` accepts int4 weights with groups of 32 on gfx942.
    Why: it accepts MXFP4 on gfx950 alone, and `make_mxfp4_moe_kernel` asks it after the conversion:
        in 0.32 the int4 flag on gfx942 ends in a ValueError once 1.56 TB are loaded.
    How: wrap one static method. The amendment of `oracle.mxfp4` offers the scheme to it.
    Upstream: https://github.com/vllm-project/vllm/pull/51274; in 0.33 `AiterMxfp4Experts` accepts
        it.
    Remove when: 0.32 is no longer supported.
"""

from typing import Any

from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32
from vllm_overlay import require, stand_down

if "AiterMxfp4Experts" in globals():
    stand_down("upstream's AiterMxfp4Experts accepts int4 weights on gfx942", expected=True)

_experts = require(f"{__name__}:AiterExperts")
_upstream = require(
    f"{__name__}:AiterExperts._supports_quant_scheme", parameters=("weight_key", "activation_key")
)


def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
    """As upstream's; also int4 weights with bfloat16 activations on gfx942."""
    if (weight_key, activation_key) == (kInt4Static32, None):
        from vllm.platforms.rocm import on_gfx942

        return on_gfx942()
    return _upstream(weight_key, activation_key)


_experts._supports_quant_scheme = staticmethod(_supports_quant_scheme)
