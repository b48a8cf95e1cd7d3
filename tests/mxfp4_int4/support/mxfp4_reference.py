# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What tests compare the conversion with, derived another way: float64 and index arithmetic, no
tables or code of the package under test."""

import numpy as np
import torch

# OCP Microscaling Formats v1.0, e2m1: the magnitudes of codes 0..7; code bit 3 is the sign.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = np.concatenate([E2M1, -E2M1])
SIGNED = np.concatenate([E2M1[1:], -E2M1[1:]])  # the 14 values that are not zero


def pack(codes: np.ndarray) -> torch.Tensor:
    """e2m1 codes [..., K] -> uint8 [..., K/2], low nibble first."""
    codes = codes.astype(np.uint8)
    return torch.from_numpy(codes[..., 0::2] | (codes[..., 1::2] << 4))


def unpack(packed: torch.Tensor) -> np.ndarray:
    data = packed.numpy()
    return np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def experts(codes: np.ndarray, byte: np.ndarray | int, groups: int = 2, rows: int = 16):
    """Groups [R, 32] with bytes [R] as MXFP4 experts [1, N, K]: `groups` a row, zero groups added
    at the end until N is a multiple of `rows`. -> weight, scale, count of real groups."""
    count = len(codes)
    bytes_ = np.broadcast_to(np.asarray(byte, dtype=np.uint8), (count,))
    padding = -count % (groups * rows)
    codes = np.concatenate([codes, np.zeros((padding, 32), codes.dtype)])
    bytes_ = np.concatenate([bytes_, np.full(padding, 127, np.uint8)])
    n = len(codes) // groups
    weight = pack(codes).view(1, n, groups * 16)
    return weight, torch.from_numpy(bytes_.copy()).view(1, n, groups), count


def normalized_error(codes: np.ndarray, byte: np.ndarray, new: np.ndarray, scale: np.ndarray):
    """Squared error of each group in units of (2^(b-127))^2, exact in float64.

    codes [R, 32] e2m1, byte [R], new [R, 32] int4, scale [R] float64. The scale relative to
    2^(b-127) has 8 significant bits, codes 4, values 4: every product and difference is exact.
    """
    relative = scale * 2.0 ** (127.0 - byte.astype(np.float64))
    used = np.where(new != 0, new * relative[:, None], 0.0)
    return ((VALUES[codes] - used) ** 2).sum(1)


def bf16_scales(byte: int) -> np.ndarray:
    """Every positive bf16 that can matter as a scale for values of 0.5..6 times 2^(b-127), relative
    to 2^(b-127): from 6/64 to 16. Smaller ones clamp everything, larger ones round all to zero."""
    bits = np.arange(1, 0x7F80, dtype=np.uint32) << 16
    relative = bits.view(np.float32).astype(np.float64) * 2.0 ** (127 - byte)
    return relative[(relative >= 6 / 64) & (relative <= 16)]


def error_table(scales: np.ndarray) -> np.ndarray:
    """[14, 2S]: least squared error of each of SIGNED at each scale of either sign."""
    both = np.concatenate([scales, -scales])
    new = np.clip(np.rint(SIGNED[:, None] / both), -8, 7)
    return (SIGNED[:, None] - new * both) ** 2


def counts(codes: np.ndarray) -> np.ndarray:
    """float64 [R, 14]: how often each of SIGNED occurs in a group [R, 32]."""
    kinds = [*range(1, 8), *range(9, 16)]
    return np.stack([(codes == kind).sum(1) for kind in kinds], 1).astype(np.float64)


def brute_force(codes: np.ndarray, byte: int, block: int = 20000) -> np.ndarray:
    """The least squared error of each group over all bf16 scales of either sign and codes -8..7, in
    units of (2^(b-127))^2. Sums are rounded: compare with a tolerance of 1e-12 of the value."""
    table = error_table(bf16_scales(byte))
    parts = [counts(codes[i : i + block]) @ table for i in range(0, len(codes), block)]
    return np.concatenate([part.min(1) for part in parts])


def quantize_to_mxfp4(dense: np.ndarray, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """float [R, 32] to e2m1 codes and scale exponents by the OCP rule: shared exponent floor(log2
    amax) - 2, or ("ceil") the least at which nothing saturates; elements to nearest, ties to even.
    """
    amax = np.abs(dense).max(1)
    safe = np.where(amax > 0, amax, 1.0)
    exponent = np.floor(np.log2(safe)) - 2 if rounding == "floor" else np.ceil(np.log2(safe / 6))
    scaled = np.minimum(np.abs(dense) * np.exp2(-exponent)[:, None], 6.0)
    step = np.where(scaled < 2, 0.5, np.where(scaled < 4, 1.0, 2.0))
    nearest = np.rint(scaled / step) * step  # the step's multiples alternate even and odd codes
    codes = np.searchsorted(E2M1, nearest)
    return codes + 8 * ((dense < 0) & (codes > 0)), exponent


def random_groups(kind: str, count: int, seed: int) -> np.ndarray:
    """e2m1 codes [count, 32] of a kind: "codes" (each of 16 alike), "few" (three codes a group), or
    a distribution put to MXFP4, as "gauss_floor" or "sparse_ceil" (nine of ten values zero)."""
    rng = np.random.default_rng(seed)
    if kind == "codes":
        return rng.integers(0, 16, (count, 32))
    if kind == "few":
        return np.take_along_axis(
            rng.integers(0, 16, (count, 3)), rng.integers(0, 3, (count, 32)), 1
        )
    name, rounding = kind.split("_")
    dense = {
        "gauss": lambda: rng.standard_normal((count, 32)),
        "laplace": lambda: rng.laplace(size=(count, 32)),
        "student": lambda: rng.standard_t(3, size=(count, 32)),
        "uniform": lambda: rng.uniform(-1, 1, (count, 32)),
        "sparse": lambda: rng.standard_normal((count, 32)) * (rng.random((count, 32)) < 0.1),
    }[name]()
    return quantize_to_mxfp4(dense, rounding)[0]


NAMES = ("gauss", "laplace", "student", "uniform", "sparse")
KINDS = (*(f"{name}_{r}" for name in NAMES for r in ("floor", "ceil")), "codes", "few")


def aiter_weight_index(row: int, k: int, depth: int) -> tuple[int, int]:
    """Byte and nibble (0 low, 1 high) of value [row, k] of an expert [N, depth] in AITER's form."""
    tile, row_in_tile = divmod(row, 16)
    group, within = divmod(k, 32)
    half, within = divmod(within, 16)
    position = (((tile * (depth // 32) + group) * 2 + half) * 16 + row_in_tile) * 16 + within
    run, value = divmod(position, 8)
    return 4 * run + value % 4, value // 4
