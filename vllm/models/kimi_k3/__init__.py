# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3 on the CPU platform: the registry finds the portable classes.

Ledger
    What: on the CPU platform `KimiLinearForCausalLM`, `KimiK3ForConditionalGeneration` and
        `KimiK3MTP` become those of the ROCm folder.
    Why: on a CPU upstream picks the NVIDIA classes, whose layers are built on CUTLASS and CuTe
        kernels and fail when they are constructed.
    How: rebind three names; the portable classes find torch forms of their Triton operations
        through the amendments of `amd/`.
    Upstream: https://github.com/vllm-project/vllm/issues/52008 (Kimi-K3 on a CPU).
    Remove when: upstream's module has a branch for the CPU platform.
"""

from vllm.platforms import current_platform
from vllm_overlay import require, stand_down

if not current_platform.is_cpu():
    stand_down("the platform is not the CPU", expected=True)

_portable = f"{__name__}.amd"
KimiLinearForCausalLM = require(
    f"{_portable}.linear:KimiLinearForCausalLM",
    parameters=("vllm_config", "prefix"),
)
KimiK3ForConditionalGeneration = require(
    f"{_portable}.model:KimiK3ForConditionalGeneration",
    parameters=("vllm_config", "prefix"),
)
KimiK3MTP = require(f"{_portable}.mtp:KimiK3MTP", parameters=("vllm_config", "prefix"))
