# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi delta attention over one sequence, 64 tokens at a time, as matrix products.

Inside a chunk the delta rule is a unit lower triangular system: with ``G_i`` the log decay summed
from the chunk's start through token i and ``S`` the state at the chunk's start, token i corrects by

    u_i = beta_i (v_i - S (k_i e^{G_i})) - beta_i sum_{j<i} <k_i e^{G_i - G_j}, k_j> u_j

so the corrections of a chunk are one triangular inverse times a right side that is linear in the
state, and a short loop carries the state from chunk to chunk. Derivations: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule" (arXiv:2406.06484) and "Kimi Linear"
(arXiv:2510.26692).

This module never sees raw gates, batches or caches; `ops` prepares its arguments.
"""

import torch

CHUNK = 64
BLOCK = 16
# Decays are held relative to the middle of a block, so an exponent spans at most half a block.
# exp(80) is 5.5e34: its products with normalized keys stay below float32's 3.4e38. K3's bound of
# -5 per token needs exp(40).
MAX_EXPONENT = 80.0


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked form of `naive_kda`: same arguments and results, float32 throughout.

    Args:
        q: ``[T, H, K]``, normalized and scaled.
        k: ``[T, H, K]``, normalized.
        v: ``[T, H, V]``.
        g: ``[T, H, K]``, log decay, at most 0; see `chunk_is_safe`.
        beta: ``[T, H]``.
        state: ``[H, V, K]``, not modified.

    Returns:
        The output ``[T, H, V]`` and the final state ``[H, V, K]``, float32.
    """
    tokens, heads, _ = q.shape
    q, k, v, g = (_to_chunks(x) for x in (q, k, v, g))
    beta = _to_chunks(beta.unsqueeze(-1))

    to_middle, middle, end = _decays(g)
    q_left = q / to_middle
    k_left = k / to_middle
    k_right = k * to_middle
    kk, qk = _pair_products(q_left, k_left, k_right, middle)
    inverse = torch.linalg.solve_triangular(
        (kk * beta).tril_(-1),
        torch.eye(CHUNK, dtype=torch.float32, device=q.device),
        upper=False,
        unitriangular=True,
    )
    qk = qk.tril_()
    from_start = middle.float().exp().repeat_interleave(BLOCK, dim=-2)
    q_start = q_left.mul_(from_start)
    k_start = k_left.mul_(from_start).mul_(beta)
    k_end = k_right.mul_((end - middle).float().exp().repeat_interleave(BLOCK, dim=-2)).mT
    v = v.mul_(beta)
    decay = end.float().exp().mT

    carry = state.float().mT.contiguous()  # [H, K, V]
    out = torch.empty_like(v)
    for n in range(v.shape[1]):
        right_side = torch.baddbmm(v[:, n], k_start[:, n], carry, alpha=-1)
        delta = torch.bmm(inverse[:, n], right_side)
        torch.baddbmm(torch.bmm(q_start[:, n], carry), qk[:, n], delta, out=out[:, n])
        carry = torch.baddbmm(carry * decay[:, n], k_end[:, n], delta)
    return out.view(heads, -1, v.shape[-1])[:, :tokens].transpose(0, 1), carry.mT.contiguous()


def chunk_is_safe(g: torch.Tensor) -> bool:
    """Whether every exponent of `chunk_kda` fits float32, for log decays ``g`` ``[T, H, K]``.

    Always true with K3's bound of -5. Without a bound a token may forget by more than e^10, and
    then only the token-by-token form is exact.
    """
    return g.numel() == 0 or float(g.min()) * (BLOCK // 2) >= -MAX_EXPONENT


def _to_chunks(x: torch.Tensor) -> torch.Tensor:
    """``[T, H, D]`` to a new contiguous float32 ``[H, chunks, 64, D]``; padding tokens are zero.

    A zero token neither decays (g = 0) nor writes (beta = 0): the state passes through it.
    """
    tokens, heads, dim = x.shape
    chunks = -(-tokens // CHUNK)
    padded = torch.empty(heads, chunks * CHUNK, dim, dtype=torch.float32, device=x.device)
    padded[:, :tokens] = x.transpose(0, 1)
    padded[:, tokens:] = 0
    return padded.view(heads, chunks, CHUNK, dim)


def _decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decays of a chunk, relative to the middles of its four blocks.

    Sums are taken in float64: they reach hundreds, where one float32 step is 3e-5, and it is
    their differences that count.

    Args:
        g: ``[H, chunks, 64, K]`` float32, log decay of each token.

    Returns:
        to_middle: ``[H, chunks, 64, K]`` float32, ``exp(G_middle - G_i)`` in the token's block.
        middle: ``[H, chunks, 4, K]`` float64, ``G`` at each block's middle.
        end: ``[H, chunks, 1, K]`` float64, ``G`` at the chunk's end.
    """
    blocks = torch.unflatten(g, -2, (CHUNK // BLOCK, BLOCK))
    within = blocks.cumsum(dim=-2, dtype=torch.float64)
    at_middle = within[..., BLOCK // 2 - 1, :]
    to_middle = torch.sub(at_middle.unsqueeze(-2), within).float().exp_().flatten(-3, -2)
    until = within[..., -1, :].cumsum(dim=-2)
    middle = until - within[..., -1, :] + at_middle
    return to_middle, middle, until[..., -1:, :]


def _pair_products(
    q_left: torch.Tensor, k_left: torch.Tensor, k_right: torch.Tensor, middle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decayed products of all token pairs of a chunk, i >= j.

    Args:
        q_left: ``[H, chunks, 64, K]``, queries decayed from their block's middle.
        k_left: the same for keys.
        k_right: keys decayed to their block's middle.
        middle: ``[H, chunks, 4, K]`` float64, log decay at the middles.

    Returns:
        ``sum_c k_ic k_jc e^{G_ic - G_jc}`` and the same with ``q_i``, each
        ``[H, chunks, 64, 64]``. Entries above the diagonal are of no meaning.
    """
    kk = q_left.new_zeros(*q_left.shape[:-1], CHUNK)
    qk = torch.zeros_like(kk)
    for i in range(CHUNK // BLOCK):
        rows, columns = slice(i * BLOCK, (i + 1) * BLOCK), slice(0, (i + 1) * BLOCK)
        # From the middle of an earlier block to the middle of this one. Where it underflows, the
        # true product is below e^(40 - 87) and adds nothing to sums of order one.
        between = (middle[..., i : i + 1, :] - middle[..., : i + 1, :]).float().exp()
        right = (k_right[..., columns, :] * between.repeat_interleave(BLOCK, dim=-2)).mT
        kk[..., rows, columns] = k_left[..., rows, :] @ right
        qk[..., rows, columns] = q_left[..., rows, :] @ right
    return kk, qk
