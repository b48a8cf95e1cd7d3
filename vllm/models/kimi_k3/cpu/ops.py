# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi delta attention behind the call forms that upstream's KDA layer uses.

Each function here has the name and the parameters of a Triton entry point of upstream's
`amd/ops`. It prepares raw projections, picks rows of the state cache and calls the chunked or the
token-by-token form. It never serves speculative tokens or prefill checkpoints and says so.

Arguments of one name mean the same in all of them, for T tokens (in decoding: N requests):

    q, k           ``[1, T, H, K]``
    v              ``[1, T, H, V]``
    raw_g          ``[1, T, H, K]``, before the gate's activation
    raw_beta       ``[1, T, H]``, before the sigmoid
    A_log          ``[H]`` float32
    g_bias         ``[H * K]`` float32, or None; also dt_bias
    lower_bound    of the log decay
    scale          of the queries; ``K ** -0.5`` when None
    initial_state  in decoding the cache ``[rows, H, V, K]``, updated in place; row 0 is nobody's
    out            ``[1, T, H, V]`` to write into, or None
"""

from itertools import pairwise

import torch

from vllm.models.kimi_k3.cpu.kda_chunk import BLOCK, chunk_is_safe, chunk_kda
from vllm.models.kimi_k3.cpu.kda_naive import kda_gate, l2_normalize, naive_kda

# Upstream's NULL_BLOCK_ID: row 0 of a cache belongs to no request.
NULL_ROW = 0


def chunk_kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    use_fused_chunk: bool = False,
    out: torch.Tensor | None = None,
    checkpoint_state: torch.Tensor | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
    checkpoint_state_indices: torch.Tensor | None = None,
    state_cache: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    backend: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prefill N sequences that lie one after another.

    Args:
        initial_state: ``[N, H, V, K]``, or None for zeros; without ``state_cache`` only.
        output_final_state: return the final states; without ``state_cache`` only.
        use_qk_l2norm_in_kernel: normalize q and k here.
        cu_seqlens: ``[N + 1]``, token offsets; None means one sequence.
        use_fused_chunk: must be False, there is no fused kernel on a CPU.
        checkpoint_offsets: must be None.
        state_cache: ``[rows, H, V, K]``, updated in place.
        state_indices: ``[N]``, row of each sequence.
        has_initial_state: ``[N]`` bool; False starts from zeros, whatever the row holds.
        backend: how vLLM 0.33 names its kernel; the portable one is "triton".

    Returns:
        The output ``[1, T, H, V]`` in the dtype of ``v`` and the final states or None.

    Raises:
        NotImplementedError: a prefill checkpoint or the fused kernel was asked for.
        ValueError: arguments that exclude or miss one another.
    """
    if checkpoint_offsets is not None or use_fused_chunk or backend != "triton":
        raise NotImplementedError(
            "KDA prefill on a CPU keeps no state checkpoints and has no fused kernel; found "
            f"checkpoint_offsets={checkpoint_offsets}, use_fused_chunk={use_fused_chunk}, "
            f"backend={backend!r}. Serve with --no-enable-prefix-caching and without "
            "kda_prefill_backend in the additional config."
        )
    if state_cache is not None and (initial_state is not None or output_final_state):
        raise ValueError("state_cache replaces initial_state and output_final_state: pass one form")
    if state_cache is not None and (state_indices is None or has_initial_state is None):
        raise ValueError("state_cache needs state_indices [N] and has_initial_state [N]")

    tokens, heads, key_dim = q.shape[1:]
    value_dim = v.shape[-1]
    if out is None:
        out = torch.empty_like(v)
    q, k, g, beta = _activate(
        q, k, raw_g, raw_beta, A_log, g_bias, lower_bound, scale, use_qk_l2norm_in_kernel
    )
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    final_states = []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        state = None
        if state_cache is not None and bool(has_initial_state[n]):  # type: ignore[index]
            state = state_cache[int(state_indices[n])]  # type: ignore[index]
        elif initial_state is not None:
            state = initial_state[n]
        if state is None:
            state = torch.zeros(heads, value_dim, key_dim, dtype=torch.float32, device=v.device)
        part = slice(start, stop)
        result, final = _sequence(q[part], k[part], v[0, part], g[part], beta[part], state.float())
        out[0, part] = result
        if state_cache is not None:
            row = int(state_indices[n])  # type: ignore[index]
            if row > NULL_ROW:
                state_cache[row] = final
        elif output_final_state:
            final_states.append(final)
    return out, torch.stack(final_states) if final_states else None


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    uniform_sequence_length: int | None = None,
    out: torch.Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step of N requests, one token each.

    Args:
        cu_seqlens: ``[N + 1]``; every sequence has one token.
        ssm_state_indices: ``[N]``, row of each request.
        num_accepted_tokens: must be None: speculative tokens are refused.

    Returns:
        The output ``[1, N, H, V]`` and ``initial_state``.

    Raises:
        NotImplementedError: more than one token for a request.
    """
    requests = cu_seqlens.numel() - 1
    if num_accepted_tokens is not None or ssm_state_indices.ndim != 1 or q.shape[1] != requests:
        raise NotImplementedError(
            f"KDA decode on a CPU takes one token per request, found {q.shape[1]} tokens of "
            f"{requests} requests and state indices of shape {tuple(ssm_state_indices.shape)}: "
            "speculative tokens are not served. Start without --speculative-config."
        )
    q, k, g, beta = _activate(
        q, k, raw_g, raw_beta, A_log, dt_bias, lower_bound, scale=None, normalize=True
    )
    result = _decode_step(q, k, v[0], g, beta, initial_state, ssm_state_indices).unsqueeze(0)
    if out is None:
        return result.to(v.dtype), initial_state
    out.copy_(result)
    return out, initial_state


def fused_recurrent_kda_packed_decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step of N requests from q, k and v side by side.

    Args:
        mixed_qkv: ``[N, 2 * H * K + H * V]``, after the convolution.
        state_indices: ``[N]``, row of each request.

    Returns:
        The output ``[1, N, H, V]`` in the dtype of ``mixed_qkv`` and ``initial_state``.

    Raises:
        ValueError: the width of ``mixed_qkv`` does not fit the state.
    """
    _, heads, value_dim, key_dim = initial_state.shape
    widths = [heads * key_dim, heads * key_dim, heads * value_dim]
    if mixed_qkv.ndim != 2 or mixed_qkv.shape[1] != sum(widths):
        raise ValueError(
            f"mixed_qkv: expected [N, {sum(widths)}] for a state of {heads} heads, {key_dim} key "
            f"and {value_dim} value channels, found {tuple(mixed_qkv.shape)}"
        )
    q, k, v = (torch.unflatten(x, -1, (heads, -1)) for x in torch.split(mixed_qkv, widths, dim=-1))
    q, k, g, beta = _activate(
        q[None], k[None], raw_g, raw_beta, A_log, dt_bias, lower_bound, scale, normalize=True
    )
    result = _decode_step(q, k, v, g, beta, initial_state, state_indices)
    return result.to(mixed_qkv.dtype).unsqueeze(0), initial_state


def prepare_chunk_metadata_device(
    cu_seqlens: torch.Tensor,
    cu_seqlens_cpu: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where every sequence's chunks lie.

    Args:
        cu_seqlens: ``[N + 1]``, gives the dtype of the indices.
        cu_seqlens_cpu: ``[N + 1]``, token offsets.
        chunk_size: tokens a chunk.

    Returns:
        ``[chunks, 2]``: sequence and number within it; ``[N + 1]`` int64: chunks before each.
    """
    counts = -(-cu_seqlens_cpu.diff() // chunk_size)
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    offsets[1:] = counts.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    within = torch.arange(sequence.numel()) - offsets[sequence]
    return torch.stack([sequence, within], dim=1).to(cu_seqlens.dtype), offsets


def _activate(
    q: torch.Tensor,
    k: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    scale: float | None,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 q, k and g ``[T, H, K]`` and beta ``[T, H]`` from raw projections ``[1, T, ...]``."""
    q, k = q[0], k[0]
    if normalize:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (
        q,
        k.float(),
        kda_gate(raw_g[0], A_log, dt_bias, lower_bound),
        raw_beta[0].float().sigmoid(),
    )


def _sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sequence ``[T, H, ...]`` in the form that is exact for it and fast."""
    # A chunk is padded to 64 tokens: below a block, token by token is the faster form as well.
    if q.shape[0] < BLOCK or not chunk_is_safe(g):
        return naive_kda(q, k, v, g, beta, state)
    return chunk_kda(q, k, v, g, beta, state)


def _decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cache: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """One token of the delta rule for N requests at once: ``[N, H, V]`` float32.

    q and k ``[N, H, K]`` are normalized; the cache is updated in place. A request on the null row
    gets zeros and writes nothing.
    """
    rows = rows.long()
    live = rows > NULL_ROW
    state = cache[rows].float() * g.exp().unsqueeze(-2)
    delta = beta.unsqueeze(-1) * (v.float() - (state @ k.unsqueeze(-1)).squeeze(-1))
    state += delta.unsqueeze(-1) * k.unsqueeze(-2)
    out = (state @ q.unsqueeze(-1)).squeeze(-1)
    cache[rows[live]] = state[live].to(cache.dtype)
    return torch.where(live.view(-1, 1, 1), out, 0.0)
