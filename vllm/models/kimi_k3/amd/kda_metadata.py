# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Chunk metadata of KDA prefill on the CPU platform.

Ledger
    What: `prepare_chunk_metadata_device` becomes the torch form.
    Why: upstream's fills the tables with a Triton kernel.
    How: rebind one name, which upstream's metadata builder looks up when it is called.
    Upstream: https://github.com/vllm-project/vllm/issues/57346 (KDA on CPUs, for another model).
    Remove when: upstream's function runs on the CPU platform.
"""

from vllm.platforms import current_platform
from vllm_overlay import require, stand_down

if not current_platform.is_cpu():
    stand_down("the platform is not the CPU", expected=True)

require(
    f"{__name__}:prepare_chunk_metadata_device",
    parameters=("cu_seqlens", "cu_seqlens_cpu", "chunk_size"),
    exact=True,
)
require(
    f"{__name__}:KimiK3ROCmKDAMetadataBuilder._build_chunk_metadata",
    uses=("prepare_chunk_metadata_device",),
)

from vllm.models.kimi_k3.cpu.ops import prepare_chunk_metadata_device  # noqa: E402, F401
