# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Rows of one matrix, bytes to bytes, in compressed-tensors' order ("pack_quantized"). Imports no
torch where compiled code does the work, so that a process which only converts starts quickly."""

import ctypes

from .definition import GROUP_BYTES, OVERFLOW
from .errors import ConversionInputError
from .native_library import Library, library
from .options import LAYOUTS, SCALE_RULES, check_scale_rule, value_error

Bytes = bytes | bytearray | memoryview


def convert_rows(
    codes: Bytes, scales: Bytes, rows: int, scale_rule: str = "mse", device: str = "cpu"
) -> tuple[memoryview, memoryview]:
    """Convert MXFP4 codes [rows, K/2] and e8m0 bytes [rows, K/32], as bytes.

    -> int32 [rows, K/8] and bfloat16 [rows, K/32], as bytes: the bits that `convert_experts` gives
    for one expert. On a CPU by compiled code, on one thread, or by torch where there is none; on
    "cuda" by torch.

    Raises ConversionInputError where the sizes do not fit each other, or a value cannot be held;
    NativeCodeError where the environment insists on compiled code that is not there.
    """
    check_scale_rule(scale_rule)
    codes, scales = memoryview(codes).cast("B"), memoryview(scales).cast("B")
    if len(codes) != GROUP_BYTES * len(scales) or rows < 1 or len(scales) % rows:
        raise ConversionInputError(
            "expected codes of [rows, K/2] and scales of [rows, K/32] bytes, received "
            f"{len(codes)} and {len(scales)} bytes for {rows} rows"
        )
    if not codes:
        return memoryview(b""), memoryview(b"")
    compiled = library() if device == "cpu" else None
    if compiled is None:
        return _convert_with_torch(codes, scales, rows, scale_rule, device)
    return _convert(compiled, codes, scales, rows, scale_rule)


def _convert(
    compiled: Library, codes: memoryview, scales: memoryview, rows: int, scale_rule: str
) -> tuple[memoryview, memoryview]:
    source_scales = _array(scales)
    if compiled.code.largest(source_scales, len(scales)) >= min(OVERFLOW):
        _check_values(codes, scales, len(scales) // rows)
    new, bits = bytearray(len(codes)), bytearray(2 * len(scales))
    layout, mse = LAYOUTS.index("pack_quantized"), SCALE_RULES.index(scale_rule) == 0
    compiled.code.convert(
        _array(codes),
        source_scales,
        _array(memoryview(new)),
        _array(memoryview(bits)),
        *(1, rows, len(scales) // rows, 0, 0),
        *(layout, mse, None, compiled.level),
    )
    return memoryview(new), memoryview(bits)


def _array(view: memoryview) -> "ctypes.Array[ctypes.c_char]":
    """The bytes, not copied unless they are read-only, as an argument of a C function."""
    kind = ctypes.c_char * len(view)
    return kind.from_buffer_copy(view) if view.readonly else kind.from_buffer(view)


def _check_values(codes: memoryview, scales: memoryview, groups: int) -> None:
    """`inputs.check_values`, without tensors."""
    bad = []
    for place, byte in enumerate(scales):
        if byte >= min(OVERFLOW):
            group = codes[GROUP_BYTES * place : GROUP_BYTES * (place + 1)]
            largest = max(max(pair & 7, pair >> 4 & 7) for pair in group)
            if largest >= OVERFLOW.get(byte, 0):
                bad.append(place)
    if bad:
        raise value_error(0, *divmod(bad[0], groups), scales[bad[0]], len(bad))


def _convert_with_torch(
    codes: memoryview, scales: memoryview, rows: int, scale_rule: str, device: str
) -> tuple[memoryview, memoryview]:
    import torch

    from .convert import convert_experts

    weight, scale = (
        torch.frombuffer(part, dtype=torch.uint8).view(1, rows, -1).to(device)
        for part in (codes, scales)
    )
    out = convert_experts(weight, scale, layout="pack_quantized", scale_rule=scale_rule)  # type: ignore[arg-type]
    new, bits = (
        tensor.cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data
        for tensor in (out.weight, out.scale)
    )
    return new, bits
