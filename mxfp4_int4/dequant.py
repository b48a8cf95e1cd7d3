# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 and converted int4 back to numbers, exactly. For tests, reports and reference experts;
never on the way of a load. Works expert by expert, so that float64 intermediates stay small."""

from typing import NamedTuple

import torch

from .definition import GROUP_SIZE
from .errors import ConversionDtypeError, ConversionInputError
from .inputs import check_source
from .layouts import gather_scales, scale_shape, unpack_codes, weight_spec
from .naive import unpack_values
from .options import check_layout
from .stats import ConversionStats

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ConvertedExperts(NamedTuple):
    """What `convert_experts` returns for experts [E, N, K] with G = K/32 groups a row.

    weight: "aiter" uint8 [E, N, K/2]; "pack_quantized" int32 [E, N, K/8]; "plain" int8 [E, N, K]
    scale: bfloat16; "aiter" flat, in the order [E, G/2, N, 2]; else [E, N, G]
    stats: None unless asked for
    """

    weight: torch.Tensor
    scale: torch.Tensor
    stats: ConversionStats | None = None


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise ConversionDtypeError(f"dtype: expected one of {FLOAT_DTYPES}, received {dtype}")


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes (uint8, any shape) -> float64 2^(b-127), NaN for 255."""
    powers = (scale.long() + (1023 - 127) << 52).view(torch.float64)
    return torch.where(scale == 255, torch.nan, powers)


def dequantize_mxfp4(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """MXFP4 experts to numbers (OCP Microscaling v1.0: e2m1 elements, e8m0 scale of 32).

    weight uint8 [E, N, K/2] (low nibble first), scale uint8 or float8_e8m0fnu [E, N, K/32]
    -> `dtype` [E, N, K]. Byte 255 gives NaN. Values of 2^128 and more (bytes 253 and 254) are
    infinite in float32 and bfloat16, exact in float64. Raises ConversionInputError.
    """
    weight, scale, (e, n, k) = check_source(weight, scale)
    _check_dtype(dtype)
    out = torch.empty((e, n, k), dtype=dtype, device=weight.device)
    for i in range(e):
        halves = unpack_values(weight[i]).double().view(n, k // GROUP_SIZE, GROUP_SIZE)
        out[i] = (halves * (scale_values(scale[i]) / 2)[..., None]).view(n, k).to(dtype)
    return out


def dequantize(
    converted: ConvertedExperts,
    layout: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Converted experts to numbers: code * scale, which float32 and float64 hold exactly.

    shape is (E, N, K). -> `dtype` [E, N, K]. Raises ConversionInputError where the tensors are not
    those of `layout` and `shape`.
    """
    check_layout(layout)
    _check_dtype(dtype)
    e, n, k = (int(size) for size in shape)
    weight, scale = converted.weight, converted.scale
    places = scale_shape(layout, (e, n, k))
    scale_size = (e * n * (k // GROUP_SIZE),) if layout == "aiter" else places
    for name, tensor, (size, kind) in (
        ("converted.weight", weight, weight_spec(layout, (e, n, k))),
        ("converted.scale", scale, (scale_size, torch.bfloat16)),
    ):
        if tuple(tensor.shape) != tuple(size) or tensor.dtype != kind:
            raise ConversionInputError(
                f'{name}: layout "{layout}" of shape {(e, n, k)} has {kind} {tuple(size)}, '
                f"received {tensor.dtype} {tuple(tensor.shape)}"
            )
    scales = gather_scales(scale, layout, (e, n, k))
    out = torch.empty((e, n, k), dtype=dtype, device=weight.device)
    for i in range(e):
        codes = unpack_codes(weight[i : i + 1], layout, (1, n, k)).double()
        groups = codes.view(n, k // GROUP_SIZE, GROUP_SIZE) * scales[i].double()[..., None]
        out[i] = groups.view(n, k).to(dtype)
    return out
