# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Everything that is refused, before anything is written. Reads the tensors, changes none."""

from collections.abc import Callable

import torch

from .definition import GROUP_BYTES, GROUP_SIZE, OVERFLOW
from .errors import ConversionDtypeError, ConversionInputError
from .layouts import AITER_ROWS
from .options import value_error

E8M0 = getattr(torch, "float8_e8m0fnu", None)
DEVICES = ("cpu", "cuda")  # a ROCm device is called "cuda" in torch


def _has_data(tensor: torch.Tensor) -> bool:
    """Whether there are bytes behind it: torch traces with tensors that only say so."""
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _plain_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """The tensor without gradient tracking and without a subclass (vLLM's parameters are one)."""
    if not isinstance(tensor, torch.Tensor):
        raise ConversionDtypeError(
            f"{name}: expected a torch.Tensor, received {type(tensor).__name__}"
        )
    if tensor.layout != torch.strided or tensor.device.type not in DEVICES:
        raise ConversionInputError(
            f"{name}: expected a strided tensor with data on one of {DEVICES}, received layout "
            f"{tensor.layout} on device {tensor.device}"
        )
    if not _has_data(tensor):
        raise ConversionInputError(
            f"{name}: expected a tensor with data, received a {type(tensor).__name__} without, as "
            "torch.compile, vmap and FakeTensorMode trace with; convert outside of them"
        )
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ConversionDtypeError(f"{name}: expected dtype {names}, received {tensor.dtype}")
    return tensor.detach().as_subclass(torch.Tensor)


def check_source(
    weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]:
    """Dtypes, shapes and devices of MXFP4 experts -> weight, scale as uint8, (E, N, K)."""
    weight = _plain_tensor("weight", weight, (torch.uint8,))
    kinds = (torch.uint8,) if E8M0 is None else (torch.uint8, E8M0)
    scale = _plain_tensor("scale", scale, kinds)
    if weight.dim() != 3 or scale.dim() != 3:
        raise ConversionInputError(
            "expected weight [E, N, K/2] and scale [E, N, K/32], received weight "
            f"{list(weight.shape)} and scale {list(scale.shape)}"
        )
    e, n, half = weight.shape
    k = 2 * half
    if k % GROUP_SIZE:
        raise ConversionInputError(
            f"weight {list(weight.shape)}: K = {k} is not a multiple of {GROUP_SIZE}"
        )
    if tuple(scale.shape) != (e, n, k // GROUP_SIZE):
        raise ConversionInputError(
            f"scale: weight {list(weight.shape)} needs scale {[e, n, k // GROUP_SIZE]} (one byte "
            f"for {GROUP_SIZE} values along K), received {list(scale.shape)}"
        )
    if weight.device != scale.device:
        raise ConversionInputError(
            f"weight is on {weight.device} and scale on {scale.device}; expected one device"
        )
    return weight, scale.view(torch.uint8), (e, n, k)


def check_layout_fits(layout: str, shape: tuple[int, int, int]) -> None:
    _, n, k = shape
    if layout == "aiter" and (n % AITER_ROWS or (k // GROUP_SIZE) % 2):
        raise ConversionInputError(
            f'layout "aiter" needs N a multiple of {AITER_ROWS} and an even number of groups of '
            f"{GROUP_SIZE} along K; received N = {n}, K = {k} ({k // GROUP_SIZE} groups)"
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor may share a byte (sufficient test)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def check_in_place(weight: torch.Tensor, scale: torch.Tensor, layout: str) -> None:
    """Whether the converted bytes can take the storage of `weight` (and, should the work be
    interrupted, whether `scale` can be written)."""
    if weight.numel() == 0:
        return
    for name, tensor in (("weight", weight), ("scale", scale)):
        if _overlaps(tensor):
            raise ConversionInputError(
                f"in_place: the elements of {name} share memory (strides {list(tensor.stride())}, "
                "an expanded tensor?); pass a tensor with its own storage or in_place=False"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ConversionInputError(
                f"in_place: {name} was created in torch.inference_mode() and cannot be written "
                "outside it; convert inside inference_mode or with in_place=False"
            )
    if layout == "pack_quantized":
        apart = [
            s for s, size in zip(weight.stride()[:2], weight.shape[:2], strict=True) if size > 1
        ]
        if weight.stride(2) != 1 or any(v % 4 for v in (*apart, weight.storage_offset())):
            raise ConversionInputError(
                'in_place: layout "pack_quantized" makes int32 words of the bytes of weight, which '
                f"must lie in runs of four; received strides {list(weight.stride())} at offset "
                f"{weight.storage_offset()}; pass weight.contiguous() or in_place=False"
            )
    # By address: two storages can lie over one buffer.
    if weight.device == scale.device and not _disjoint(weight, scale):
        raise ConversionInputError(
            "in_place: weight and scale share memory or lie interleaved in it, and the weight's "
            "bytes are overwritten while the scales are still read; pass tensors that lie apart or "
            "in_place=False"
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum(s * (size - 1) for s, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + int(reach) + 1


def _disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a1 <= b0 or b1 <= a0


def check_values(
    weight: torch.Tensor, scale: torch.Tensor, largest_byte: Callable[[torch.Tensor], int]
) -> None:
    """Refuse NaN scales and values that bf16 cannot hold, naming the first place.

    Only groups with a byte of 253 or more need a look at their codes, so that the usual cost is
    one maximum over the scales.
    """
    threshold = min(OVERFLOW)
    if scale.numel() == 0 or largest_byte(scale) < threshold:
        return
    count, first = 0, None
    for expert in range(len(scale)):
        rows, groups = torch.nonzero(scale[expert] >= threshold, as_tuple=True)
        if not len(rows):
            continue
        byte = scale[expert][rows, groups]
        packed = weight[expert].reshape(*scale.shape[1:], GROUP_BYTES)[rows, groups]
        largest = torch.maximum(packed & 7, (packed >> 4) & 7).amax(-1)
        bad = byte == 255
        for value, code in OVERFLOW.items():
            bad |= (byte == value) & (largest >= code)
        places = torch.nonzero(bad).flatten()
        count += len(places)
        if len(places) and first is None:
            i = int(places[0])
            first = (expert, int(rows[i]), int(groups[i]), int(byte[i]))
    if first is None:
        return
    raise value_error(*first, count)
