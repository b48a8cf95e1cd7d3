# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi delta attention, token by token: the definition of what is right.

Every fast form in this package is tested against these functions. They never batch, chunk or
reorder anything, and the engine calls them for very short prompts only.

Symbols: T tokens, H heads, K key channels, V value channels (K3: K = V = 128).
"""

import torch


def kda_gate(
    raw_g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Log decay of every key channel, from the raw gate projection.

    Args:
        raw_g: ``[..., H, K]``, any floating dtype.
        A_log: ``[H]`` float32.
        dt_bias: ``[H * K]`` float32, or None.
        lower_bound: negative bound of the log decay (K3: -5.0); None selects the unbounded form.

    Returns:
        ``[..., H, K]`` float32, never positive: ``lower_bound * sigmoid(exp(A_log) * x)`` with a
        bound and ``-exp(A_log) * softplus(x)`` without, where ``x = raw_g + dt_bias``.
    """
    x = raw_g.float()
    if dt_bias is not None:
        x = x + dt_bias.float().view(x.shape[-2:])
    speed = A_log.float().exp().unsqueeze(-1)
    if lower_bound is None:
        return -speed * torch.nn.functional.softplus(x)
    return lower_bound * torch.sigmoid(speed * x)


def l2_normalize(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + eps)`` along the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + eps)


def naive_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over one sequence, one token at a time.

    For each token the state first forgets (a factor ``exp(g)`` for every key channel), is then
    corrected towards ``v`` where ``k`` points, and is read where ``q`` points.

    Args:
        q: ``[T, H, K]``, normalized and scaled.
        k: ``[T, H, K]``, normalized.
        v: ``[T, H, V]``.
        g: ``[T, H, K]``, log decay, at most 0.
        beta: ``[T, H]``, step size in (0, 1).
        state: ``[H, V, K]``, the state before the first token; not modified.

    Returns:
        The output ``[T, H, V]`` and the state ``[H, V, K]`` after the last token, in the dtype
        of ``state`` (the tests also run this in float64).
    """
    state = state.clone()
    out = torch.empty(v.shape, dtype=state.dtype, device=v.device)
    q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, g, beta))
    for t in range(q.shape[0]):
        state *= g[t].exp().unsqueeze(-2)
        seen = (state @ k[t].unsqueeze(-1)).squeeze(-1)
        delta = beta[t].unsqueeze(-1) * (v[t] - seen)
        state += delta.unsqueeze(-1) * k[t].unsqueeze(-2)
        out[t] = (state @ q[t].unsqueeze(-1)).squeeze(-1)
    return out, state
