# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Random weights with which a Kimi-K3 model behaves like one.

Projections keep the size of what they project, norms are near one, the router spreads tokens over
experts, state decays range from a token to hundreds, and logits are far enough apart for a greedy
choice to be stable in float32. Every tensor has its own seed, so its values depend neither on the
order of drawing nor on the number of shards.
"""

import hashlib

import torch

from k3_checkpoint.tensors import Role, TensorSpec
from mxfp4_int4 import GROUP_SIZE

# Boundaries between the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 of e2m1, halfway.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# e2m1's largest power of two is 2^2, so the largest magnitude of a group lands in [4, 8).
_E2M1_EXPONENT = 2
_E8M0_BIAS = 127


def draw(tensor: TensorSpec, seed: int, *, heads: int) -> torch.Tensor:
    """Values of a tensor that is not part of an MXFP4 expert.

    Args:
        tensor: what to draw.
        seed: of the whole checkpoint.
        heads: entries of A_log past these are zero, as in the published checkpoint.

    Returns:
        A tensor of the shape and dtype that ``tensor`` names.

    Raises:
        ValueError: codes and scales of MXFP4, which are drawn together by `draw_mxfp4`.

    """
    generator = _generator(tensor.name, seed)
    shape = tensor.shape

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    match tensor.role:
        case Role.LINEAR:
            values = normal() * _fan_in(shape) ** -0.5
        case Role.EMBEDDING:
            values = normal()
        case Role.LM_HEAD:
            # Logits of standard deviation 3: the best two of 512 are then 0.8 apart on average.
            values = normal() * 3.0 * _fan_in(shape) ** -0.5
        case Role.NORM:
            values = 1.0 + 0.1 * normal()
        case Role.CONV:
            values = normal() * _fan_in(shape) ** -0.5
        case Role.A_LOG:
            values = uniform(-1.0, 0.5)
            values[heads:] = 0.0
        case Role.DT_BIAS:
            # With the bound of -5: decays of e^-0.1 to e^-3.6 a token before the gate's input.
            values = uniform(-4.0, 1.0)
        case Role.ROUTER_BIAS:
            values = 0.05 * normal()
        case Role.CODES | Role.SCALES:
            raise ValueError(f"{tensor.name}: MXFP4 codes and scales are drawn together")
    return values.to(torch.float32 if tensor.dtype == "F32" else torch.bfloat16)


def draw_mxfp4(codes: TensorSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of one expert projection, rounded from normal values.

    Args:
        codes: the ``weight_packed`` tensor ``[N, K / 2]``.
        seed: of the whole checkpoint.

    Returns:
        ``[N, K / 2]`` uint8, the low nibble first, and ``[N, K / 32]`` uint8, e8m0.

    """
    rows, packed = codes.shape
    columns = 2 * packed
    values = torch.randn(rows, columns, generator=_generator(codes.name, seed)) * columns**-0.5
    return quantize_mxfp4(values)


def quantize_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 ``[N, K]`` to MXFP4 by the OCP rule: scale 2^(floor(log2(amax)) - 2)."""
    groups = values.view(values.shape[0], -1, GROUP_SIZE)
    _, exponent = torch.frexp(groups.abs().amax(dim=-1))
    # frexp's mantissa lies in [0.5, 1): floor(log2(amax)) is its exponent minus one.
    exponent = (exponent - 1 - _E2M1_EXPONENT).clamp(-_E8M0_BIAS, 127)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    magnitude = torch.bucketize(scaled.abs(), torch.tensor(_BOUNDARIES))
    codes = (magnitude + 8 * (scaled < 0)).to(torch.uint8).flatten(1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.contiguous(), (exponent + _E8M0_BIAS).to(torch.uint8)


def _fan_in(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape[1:]:
        size *= length
    return size


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
