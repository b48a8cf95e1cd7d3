# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""KDA prefill on the CPU platform.

Ledger
    What: `chunk_kda_prefill` becomes the torch form.
    Why: upstream's is made of Triton and HIP kernels, and gathers states with a Triton kernel.
    How: rebind one name before the KDA layer's module imports it.
    Upstream: https://github.com/vllm-project/vllm/issues/57346 (KDA on CPUs, for another model).
    Remove when: upstream's function runs on the CPU platform.
"""

from vllm.platforms import current_platform
from vllm_overlay import require, stand_down

if not current_platform.is_cpu():
    stand_down("the platform is not the CPU", expected=True)

require(
    f"{__name__}:chunk_kda_prefill",
    parameters=("q", "k", "v", "raw_g", "raw_beta", "A_log", "g_bias", "state_cache"),
)

from vllm.models.kimi_k3.cpu.ops import chunk_kda_prefill  # noqa: E402, F401
