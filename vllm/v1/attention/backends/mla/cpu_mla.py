# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MLA on a CPU beside layers with a recurrent state.

Ledger
    What: `CPUMLABackend.supports_block_size` accepts every multiple of 16.
    Why: a hybrid model aligns its block size to 128 tokens or more so that attention and state
        pages have one size. The backend refuses it, although the engine hands its kernel pages of
        16 tokens either way (`get_supported_kernel_block_sizes`).
    How: replace one class method in place.
    Upstream: none found; to file: [Bug][CPU] MLA backend refuses the block size of a hybrid model
        (KDA beside MLA). Kernel pages smaller than a block are from
        https://github.com/vllm-project/vllm/pull/24486.
    Remove when: upstream's `CPUMLABackend.supports_block_size(128)` is True.
"""

from typing import Any

from vllm_overlay import require, stand_down

_backend = require(f"{__name__}:CPUMLABackend")
require(f"{__name__}:CPUMLABackend.supports_block_size", parameters=("block_size",))
_KERNEL_BLOCK = 16
if _backend.get_supported_kernel_block_sizes() != [_KERNEL_BLOCK]:
    stand_down("upstream's CPU MLA kernel is no longer bound to pages of 16 tokens")
if _backend.supports_block_size(8 * _KERNEL_BLOCK):
    stand_down("upstream's CPU MLA accepts aligned block sizes")


def _supports_block_size(cls: Any, block_size: int | None) -> bool:
    """Whether the engine can split blocks of ``block_size`` tokens into the kernel's pages."""
    return block_size is None or block_size % _KERNEL_BLOCK == 0


_backend.supports_block_size = classmethod(_supports_block_size)
