# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""KDA decode on the CPU platform.

Ledger
    What: `fused_recurrent_kda` and `fused_recurrent_kda_packed_decode` become the torch forms.
    Why: upstream's are Triton kernels.
    How: rebind two names before the package above re-exports them.
    Upstream: https://github.com/vllm-project/vllm/issues/57346 (KDA on CPUs, for another model).
    Remove when: upstream's functions run on the CPU platform.
"""

from vllm.platforms import current_platform
from vllm_overlay import require, stand_down

if not current_platform.is_cpu():
    stand_down("the platform is not the CPU", expected=True)

_SHARED = ("raw_g", "raw_beta", "A_log", "dt_bias", "lower_bound", "initial_state")
require(
    f"{__name__}:fused_recurrent_kda",
    parameters=("q", "k", "v", *_SHARED, "cu_seqlens", "ssm_state_indices"),
)
require(
    f"{__name__}:fused_recurrent_kda_packed_decode",
    parameters=("mixed_qkv", *_SHARED, "state_indices"),
)

from vllm.models.kimi_k3.cpu.ops import (  # noqa: E402
    fused_recurrent_kda,  # noqa: F401
    fused_recurrent_kda_packed_decode,  # noqa: F401
)
