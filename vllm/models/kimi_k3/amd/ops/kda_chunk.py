# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The fused KDA prefill kernel, on the CPU platform.

Ledger
    What: `is_fused_kda_chunk_supported` answers False on the CPU platform.
    Why: upstream's asks `vllm.platforms.rocm`, which cannot be imported without a GPU.
    How: rebind one name before the KDA layer's module imports it.
    Upstream: https://github.com/vllm-project/vllm/pull/54038 (the function); to file: [CPU]
        Kimi-K3: support checks import vllm.platforms.rocm.
    Remove when: upstream's function answers False on the CPU platform.
"""

from vllm.platforms import current_platform
from vllm_overlay import require, stand_down

if not current_platform.is_cpu():
    stand_down("the platform is not the CPU", expected=True)

require(f"{__name__}:is_fused_kda_chunk_supported", parameters=(), exact=True)


def is_fused_kda_chunk_supported() -> bool:
    """Return False: the kernel is a HIP kernel."""
    return False
