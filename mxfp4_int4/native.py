# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The conversion of CPU tensors by compiled code (native.c), a block of rows at a time. Where there
is none (see `native_library`) `lookup` does the work: slower, and never in other bits."""

from collections.abc import Callable

import torch

from . import lookup
from .blocks import run_blocks, scale_part, slabs
from .definition import GROUP_BYTES, GROUP_SIZE
from .errors import NativeCodeError
from .layouts import AITER_ROWS, LAYOUTS, SCALE_RULES
from .native_library import Library, library

# Packed bytes of a call, under a millisecond: Ctrl-C and a failure elsewhere wait no longer.
BLOCK_BYTES = 2 << 20
SMALL_BYTES = 512 << 10


def _present() -> Library:
    compiled = library()
    if compiled is None:
        raise NativeCodeError("there is no compiled code, or it is switched off: use `lookup`")
    return compiled


def largest_byte(scale: torch.Tensor) -> int:
    """The largest of a uint8 tensor that is not empty. On one thread: torch's own waits for its
    others far longer than this takes, where they are busy."""
    if not scale.is_contiguous():
        return lookup.largest_byte(scale)
    return int(_present().code.largest(scale.data_ptr(), scale.numel()))


def convert_slab(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    """Convert uint8 [E, N, K/2] and uint8 [E, N, G] into buffers shaped as `layouts` says; the
    scale buffer is int16 (bf16 bits). Blocks run on torch.get_num_threads() threads."""
    compiled = _present()
    e, n, g = scale.shape
    threads = torch.get_num_threads()
    # Four blocks a thread, so that all end at about the same time, yet none that take less time
    # than it takes to start a thread.
    limit = min(BLOCK_BYTES, max(SMALL_BYTES, weight.numel() // (4 * threads)))

    def worker() -> Callable[[tuple[slice, slice]], None]:
        size = AITER_ROWS * g * GROUP_BYTES if layout == "aiter" else 0
        held = torch.empty(size, dtype=torch.uint8, device="cpu")
        return lambda part: _convert_block(
            compiled,
            weight[part],
            scale[part],
            layout,
            scale_rule,
            out_weight[part],
            scale_part(out_scale, layout, *part),
            held,
        )

    run_blocks(slabs((e, n, g * GROUP_SIZE), e, limit), threads, worker)


def _convert_block(
    compiled: Library,
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
    held: torch.Tensor,
) -> None:
    """Whole experts, or rows of one. `held` is for 16 rows of weight."""
    source, bytes_ = weight.contiguous(), scale.contiguous()
    pairs = layout == "aiter" and out_scale.stride()[2:] == (2, 1)
    if not out_weight.is_contiguous() or not (pairs or out_scale.is_contiguous()):
        raise ValueError("native.convert_slab writes to contiguous buffers")
    compiled.code.convert(
        *(tensor.data_ptr() for tensor in (source, bytes_, out_weight, out_scale)),
        *scale.shape,
        *out_scale.stride()[:2],
        LAYOUTS.index(layout),
        SCALE_RULES.index(scale_rule) == 0,
        held.data_ptr(),
        compiled.level,
    )
