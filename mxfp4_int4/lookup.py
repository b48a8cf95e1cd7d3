# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The conversion on a CPU: torch operations on tables, no arithmetic per code. Also runs on a GPU
without Triton; never on the way of a load on a GPU that has it.

Each byte (two codes) is looked up in a table of what it adds to every candidate's error and fit;
`embedding_bag` adds that up over a group. The choice and the scale follow from the sums, one group
a lane, and a second table gives the new codes. Sums are exact, so the decisions are `naive`'s.
"""

from collections.abc import Callable

import torch

from .blocks import run_blocks, scale_part, slabs
from .definition import (
    ABSMAX_FLOOR_BITS,
    ABSMAX_FLOOR_BYTE,
    ABSMAX_SCALE_OFFSET,
    CANDIDATES,
    FLOOR_BYTES,
    GROUP_BYTES,
    GROUP_SIZE,
    KEY,
    MAGNITUDES,
)
from .layouts import AITER_ROWS, aligned, place_scales
from .lookup_tables import BYTES, NORM, ROWS, WIDTH, code_table, sum_table

# Lanes of a block: many, so that starting an operation costs little, yet so few in all threads
# together that their working memory (about 300 bytes a group) stays under 48 MiB.
BLOCK_GROUPS = 32768
ALL_GROUPS = 131072
_NEGATIVE = sum((c < 0) << i for i, c in enumerate(CANDIDATES))


class Buffers:
    """Tables and working memory of one thread for up to `groups` groups, reused from block to
    block: fresh memory of this size costs more (page faults) than the work done in it."""

    def __init__(self, groups: int, layout: str, scale_rule: str, device: torch.device) -> None:
        self.sum_table = sum_table().to(device)
        self.code_table = code_table(scale_rule, layout).to(device)
        code = torch.uint8 if layout == "pack_quantized" else torch.int16
        self.index = torch.empty((groups, GROUP_BYTES), dtype=torch.int32, device=device)
        self.codes = torch.empty((groups, GROUP_BYTES), dtype=code, device=device)
        self.joined = torch.empty((groups, GROUP_BYTES // 4), dtype=torch.int32, device=device)
        places = torch.arange(groups, dtype=torch.int32, device=device)
        self.starts = places * GROUP_BYTES
        self.fits = places * (2 * WIDTH) + WIDTH


def _choose_mse(
    index: torch.Tensor, byte: torch.Tensor, buffers: Buffers
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [R, 16], rows of `sum_table`, and int32 [R] -> candidate int32 [R], scale bits [R]."""
    groups = len(index)
    starts = buffers.starts[:groups]
    sums = torch.embedding_bag(buffers.sum_table, index.view(-1), starts)[0].view(-1)
    best = torch.max_pool1d(sums.view(1, 1, -1), kernel_size=WIDTH, stride=2 * WIDTH)
    choice = best.view(-1).to(torch.int32).neg_().bitwise_and_(KEY - 1)
    fit = sums.index_select(0, choice + buffers.fits[:groups]).to(torch.int32)
    norm = fit >> NORM.bit_length() - 1
    bits = _fit_scale(fit.bitwise_and_(NORM - 1), norm, byte)
    negative = torch.bitwise_right_shift(_NEGATIVE, choice).bitwise_and_(1)
    return choice, bits.add_(negative, alpha=0x8000)


def _fit_scale(fit: torch.Tensor, norm: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """bf16 bits of fit/norm half units at `byte`, as `naive.quantize_mse` defines them. The first
    two are used up."""
    full = norm.clamp(max=1)  # 0 for a group of zeros, whose scale is 1
    fit.add_(1).sub_(full)
    norm.add_(1).sub_(full)
    twice = norm << 1
    small = (fit - twice).bitwise_right_shift_(31)  # -1 for a scale under 2
    j = torch.minimum(byte, small.neg_().add_(1))
    # Numerator and denominator are under 2^20, so the float32 quotient's floor is exact: a quotient
    # that is no integer is further than 2^-20 of itself from one, and rounding moves it by 2^-24.
    scaled = fit.bitwise_left_shift_(j + 6).add_(norm)
    mantissa = scaled.float().div_(twice.float()).to(torch.int32)
    return mantissa.add_(byte - j, alpha=128)


def _choose_absmax(packed: torch.Tensor, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [R, 16], int32 [R] -> code map int32 [R], scale bits int32 [R]."""
    device = packed.device
    largest = torch.maximum(packed & 7, (packed >> 4) & 7).amax(1).to(torch.int32)
    top = torch.tensor(ABSMAX_FLOOR_BYTE, dtype=torch.int32, device=device)
    offset = torch.tensor(ABSMAX_SCALE_OFFSET, dtype=torch.int32, device=device)
    floor = byte <= top.index_select(0, largest)
    under = len(MAGNITUDES) + (byte - FLOOR_BYTES[0]).clamp(0, len(FLOOR_BYTES) - 1)
    choice = torch.where(floor & (largest > 0), under, largest)
    bits = 128 * byte + offset.index_select(0, largest)
    return choice, torch.where(floor, ABSMAX_FLOOR_BITS, bits)


def _block(
    packed: torch.Tensor, byte: torch.Tensor, layout: str, scale_rule: str, buffers: Buffers
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [R, 16], uint8 [R] -> the groups' new bytes in `layout`, each group on its own (in
    `buffers`), and bf16 scale bits int32 [R]."""
    groups = len(packed)
    byte = byte.to(torch.int32)
    index = buffers.index[:groups].copy_(packed)
    index[:, 0].add_(BYTES)
    if scale_rule == "mse":
        choice, bits = _choose_mse(index, byte, buffers)
    else:
        choice, bits = _choose_absmax(packed, byte)
    index.add_(choice.mul_(ROWS)[:, None])
    codes = buffers.codes[:groups]
    torch.index_select(buffers.code_table, 0, index.view(-1), out=codes.view(-1))
    if layout == "aiter":
        four = codes.view(torch.int32)
        codes = torch.add(four[:, 0::2], four[:, 1::2], alpha=16, out=buffers.joined[:groups])
    return codes, bits


def _convert_rows(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
    buffers: Buffers,
) -> None:
    """One block: uint8 [N, K/2] and [N, G] of one expert into its part of the buffers."""
    n, g = scale.shape
    packed = aligned(weight).view(-1, GROUP_BYTES)
    codes, bits = _block(packed, scale.reshape(-1), layout, scale_rule, buffers)
    if layout == "aiter":
        # int64 is 16 codes, the half of a group: [row, group, half] -> [group, half, row] per tile
        tiles = codes.view(torch.int64).view(n // 16, 16, g, 2).permute(0, 2, 3, 1)
        out_weight.view(torch.int64).view(n // 16, g, 2, 16).copy_(tiles)
    else:
        out_weight.copy_(codes.view(out_weight.dtype).view(out_weight.shape))
    out_scale.copy_(place_scales(bits.to(torch.int16).view(1, n, g), layout)[0])


def largest_byte(scale: torch.Tensor) -> int:
    """The largest of a uint8 tensor that is not empty."""
    return int(scale.max())


def converts_in_place(layout: str, groups: int) -> bool:
    """Whether `convert_slab` may be given the bytes of `weight` as its output: a block of rows is
    read before it is written, and takes the same bytes in both forms."""
    return layout != "plain"


def convert_slab(
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    """Convert uint8 [E, N, K/2] and uint8 [E, N, G] into buffers shaped as `layouts` says; the
    scale buffer is int16 (bf16 bits). Blocks of rows run on torch.get_num_threads() threads."""
    e, n, g = scale.shape
    threads = torch.get_num_threads() if weight.device.type == "cpu" else 1
    groups = min(BLOCK_GROUPS, ALL_GROUPS // threads)
    code_table(scale_rule, layout), sum_table()  # once, rather than by every thread

    def worker() -> Callable[[tuple[slice, slice]], None]:
        buffers = Buffers(max(groups, AITER_ROWS * g), layout, scale_rule, weight.device)
        return lambda part: _convert_rows(
            weight[part][0],
            scale[part][0],
            layout,
            scale_rule,
            out_weight[part][0],
            scale_part(out_scale, layout, *part)[0],
            buffers,
        )

    run_blocks(slabs((e, n, g * GROUP_SIZE), 1, groups * GROUP_BYTES), threads, worker)
