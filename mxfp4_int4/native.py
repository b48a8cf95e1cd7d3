# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The conversion on a CPU by compiled code: native.c, where there is a C compiler.

Compiled once for a user and machine, loaded once for a process, and tried on known groups before
it is used. Without it `lookup` does the work: slower, and never in other bits.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from threading import Lock
from time import perf_counter

import torch

from . import lookup, naive
from .blocks import run_blocks, scale_part, slabs
from .errors import ConversionInputError, NativeCodeError
from .layouts import (
    AITER_ROWS,
    LAYOUTS,
    SCALE_RULES,
    pack_codes,
    place_scales,
    scale_shape,
    weight_spec,
)
from .native_build import build_library, built_library

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_KIMI_K3_NATIVE"
# Looking for a library takes some tens of milliseconds, compiling one or two seconds. So many bytes
# are converted by `lookup` first, in as long a time.
LOAD_BYTES = 16 << 20
BUILD_BYTES = 256 << 20
# Packed bytes of a call, under a millisecond: Ctrl-C and a failure elsewhere wait no longer.
BLOCK_BYTES = 2 << 20
SMALL_BYTES = 512 << 10

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int


class _State:
    """What this process has found out so far."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.library: ctypes.CDLL | None = None
        self.failed = False
        self.seen = 0  # bytes that would have been converted natively


_state = _State()


def switch() -> bool | None:
    """What the environment says: True (have it or fail), False (leave it), None (as it pays)."""
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConversionInputError(
            f"{VARIABLE}: expected 0 (never), 1 (always, or fail) or nothing, received {text!r}"
        )
    return bool(int(text)) if text else None


def is_worth(packed_bytes: int) -> bool:
    """Whether `convert_slab` is there for so many bytes more, or is worth the making. Raises
    NativeCodeError only where the environment insists on it."""
    wanted = switch()
    if wanted is False:
        return False
    if _state.library is not None:
        return True
    if wanted:
        library()
        return True
    with _state.lock:
        _state.seen += packed_bytes
        seen, failed = _state.seen, _state.failed
    if failed or seen < LOAD_BYTES:
        return False
    try:
        return library(build=seen >= BUILD_BYTES) is not None
    except NativeCodeError as error:  # `lookup` gives the same bits
        with _state.lock:
            first, _state.failed = not _state.failed, True
        if first:
            logger.info(
                "MXFP4 is converted on the CPU by torch, at about a tenth of the speed, for want "
                "of compiled code: %s",
                error,
            )
        return False


def library(build: bool = True) -> ctypes.CDLL | None:
    """native.c, loaded; None if it has not been built and is not to be. Raises NativeCodeError."""
    with _state.lock:
        if _state.library is None:
            try:
                _state.library = _load() or (_build() if build else None)
            except NativeCodeError:
                raise
            except Exception as error:  # of the folder, the compiler or the loader, whatever it is
                raise NativeCodeError(f"{type(error).__name__}: {error}") from error
        return _state.library


def _load() -> ctypes.CDLL | None:
    """From the cache; None if it is not there, or is no good and has to be built anew."""
    path = built_library()
    if path is None:
        return None
    try:
        return _open(path)
    except (OSError, NativeCodeError) as error:
        logger.info("%s is not used: %s", path, error)
        return None


def _build() -> ctypes.CDLL:
    start, made = perf_counter(), list[ctypes.CDLL]()
    build_library(lambda path: made.append(_open(path)))
    logger.info("compiled the CPU conversion of MXFP4 in %.1f s", perf_counter() - start)
    return made[0]


def _open(path: Path) -> ctypes.CDLL:
    code = ctypes.CDLL(str(path))  # its calls let other threads run
    code.convert.argtypes = [_POINTER] * 4 + [_SIZE] * 5 + [_INT] * 2 + [_POINTER]
    code.convert.restype = None
    code.largest.argtypes = [_POINTER, _SIZE]
    code.largest.restype = ctypes.c_uint8
    _try(code)
    return code


def _known_groups() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Experts [2, 16, 64] with, among them, every byte that bf16 holds, every code alone in its
    group, mixtures of few codes and of many."""
    place = torch.arange(2 * 16 * 32, dtype=torch.int64, device="cpu")
    group = place // 16
    noise = (place * 2654435761 >> 7) % 256
    few = (group * 40503 >> 3) % 256
    alike = group % 16 * 17
    kinds = (noise, noise & few, alike, alike & 0x70 | noise & 0x8F)
    bytes_ = torch.arange(256, dtype=torch.int64, device="cpu") % 253
    return [
        (kind.to(torch.uint8).view(2, 16, 32), part.to(torch.uint8).view(2, 16, 2))
        for kind, part in zip(kinds, bytes_.split(64), strict=True)
    ]


def _try(code: ctypes.CDLL) -> None:
    """Compare with the definition. 15 rows do not fill the last block of lanes."""
    for (weight, scale), rule in product(_known_groups(), SCALE_RULES):
        codes, bits = _buffers("plain", (2, 16, 64))
        naive.convert_slab(weight, scale, "plain", rule, codes, bits)
        for layout, n in (("aiter", 16), ("pack_quantized", 15), ("plain", 15)):
            new, new_bits = _buffers(layout, (2, n, 64))
            _convert_with(code, weight[:, :n], scale[:, :n], layout, rule, new, new_bits)
            if not (
                torch.equal(new, pack_codes(codes[:, :n], layout))
                and torch.equal(new_bits, place_scales(bits[:, :n].contiguous(), layout))
            ):
                raise NativeCodeError(
                    f"the compiled code gives other bits than the definition (layout {layout}, "
                    f"rule {rule}): the compiler may be at fault"
                )
        if _largest(code, scale) != int(scale.max()):
            raise NativeCodeError("the compiled code gives another maximum: is the compiler right?")


def _buffers(layout: str, shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    size, dtype = weight_spec(layout, shape)
    bits = torch.empty(scale_shape(layout, shape), dtype=torch.int16, device="cpu")
    return torch.empty(size, dtype=dtype, device="cpu"), bits


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
    _convert_with(_present(), weight, scale, layout, scale_rule, out_weight, out_scale)


def largest_byte(scale: torch.Tensor) -> int:
    """The largest of a uint8 tensor that is not empty. On one thread: torch's own waits for its
    others far longer than this takes, where they are busy."""
    return _largest(_present(), scale) if scale.is_contiguous() else lookup.largest_byte(scale)


def _present() -> ctypes.CDLL:
    code = library()
    assert code is not None  # library() builds it or raises
    return code


def _largest(code: ctypes.CDLL, scale: torch.Tensor) -> int:
    return code.largest(scale.data_ptr(), scale.numel())


def _convert_with(
    code: ctypes.CDLL,
    weight: torch.Tensor,
    scale: torch.Tensor,
    layout: str,
    scale_rule: str,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    e, n, g = scale.shape
    threads = torch.get_num_threads()
    # Four blocks a thread, so that all end at about the same time, yet none that take less time
    # than it takes to start a thread.
    limit = min(BLOCK_BYTES, max(SMALL_BYTES, weight.numel() // (4 * threads)))

    def worker() -> Callable[[tuple[slice, slice]], None]:
        size = AITER_ROWS * g * 16 if layout == "aiter" else 0
        held = torch.empty(size, dtype=torch.uint8, device="cpu")
        return lambda part: _convert_block(
            code,
            weight[part],
            scale[part],
            layout,
            scale_rule,
            out_weight[part],
            scale_part(out_scale, layout, *part),
            held,
        )

    run_blocks(slabs((e, n, g * 32), e, limit), threads, worker)


def _convert_block(
    code: ctypes.CDLL,
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
    code.convert(
        source.data_ptr(),
        bytes_.data_ptr(),
        out_weight.data_ptr(),
        out_scale.data_ptr(),
        *scale.shape,
        out_scale.stride(0),
        out_scale.stride(1),
        LAYOUTS.index(layout),
        SCALE_RULES.index(scale_rule) == 0,
        held.data_ptr(),
    )
