# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Rows of MXFP4 bytes to rows of int4 bytes. The only module of this package that uses torch, and
with compiled code on a CPU not even this one does."""

import struct

from kimi_k3.convert.options import ConversionFailed
from mxfp4_int4 import GROUP_SIZE, ConversionError, native_library
from mxfp4_int4 import rows as int4_rows


def check_device(device: str) -> None:
    """Refuse what no shard could be converted with, before anything is written.

    Raises:
        ConversionFailed: No GPU, or a torch without support for it; or the environment insists on
            compiled code that cannot be had.
    """
    if device == "cpu":
        try:
            native_library.library()
        except ConversionError as error:
            raise ConversionFailed(f"{error}. Nothing was written") from error
        return
    import torch

    if not torch.cuda.is_available():
        raise ConversionFailed(
            f"--device {device}: expected a GPU that torch {torch.__version__} can use, found "
            "none. Without the option a CPU gives the same bits"
        )


def needs_torch(device: str) -> bool:
    """Whether `convert_rows` imports torch."""
    return True


def convert_rows(
    codes: memoryview, scales: memoryview, rows: int, scale_rule: str, device: str
) -> tuple[memoryview, memoryview]:
    """Convert whole rows of one matrix.

    Args:
        codes: MXFP4 codes, `[rows, K/2]` bytes.
        scales: e8m0 bytes, `[rows, K/32]`.
        rows: How many.
        scale_rule: "mse" or "absmax".
        device: "cpu" or "cuda".

    Returns:
        int32 `[rows, K/8]` and bfloat16 `[rows, K/32]`, as bytes.

    Raises:
        ConversionInputError: A value that int4 cannot hold (a ValueError).
    """
    if not codes:
        return memoryview(b""), memoryview(b"")
    return int4_rows.convert_rows(codes, scales, rows, scale_rule, device)


def library_agrees(codes: memoryview, scales: memoryview, rows: int, columns: int) -> bool:
    """Whether compressed-tensors decompresses int4 bytes to the values that this project reads.

    Args:
        codes: Of `convert_rows`.
        scales: Of `convert_rows`.
        rows: How many.
        columns: Values of a row.
    """
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    import mxfp4_int4

    packed = torch.frombuffer(codes, dtype=torch.int32).view(rows, -1)
    scale = torch.frombuffer(scales, dtype=torch.bfloat16).view(rows, -1)
    state = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP_SIZE)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    theirs = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    ours = mxfp4_int4.dequantize(
        mxfp4_int4.ConvertedExperts(packed[None], scale[None]),
        "pack_quantized",
        (1, rows, columns),
        theirs.dtype,
    )
    return torch.equal(theirs, ours[0])


def shape_bytes(rows: int, columns: int) -> bytes:
    """`weight_shape` as compressed-tensors writes it: int64 `[N, K]`."""
    return struct.pack("<2q", rows, columns)
