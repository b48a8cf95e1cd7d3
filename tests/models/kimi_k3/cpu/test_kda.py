# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi delta attention in torch: the chunked and the batched forms against the definition."""

import pytest
import torch

from vllm.models.kimi_k3.cpu import ops
from vllm.models.kimi_k3.cpu.kda_chunk import chunk_is_safe, chunk_kda
from vllm.models.kimi_k3.cpu.kda_naive import kda_gate, l2_normalize, naive_kda

# A float32 sum of 128 products carries a relative error of about sqrt(128) * 2^-24 = 7e-7. Outputs
# pass through a handful of such sums, and through as many chunks as their state is old.
RTOL = 5e-6


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest exact value."""
    return ((actual.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


def inputs(tokens, heads=2, dim=64, *, gate_shift=0.0, lower_bound=-5.0, seed=0, value_dim=None):
    """Random raw projections of one sequence and their activated forms."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    value_dim = value_dim or dim
    raw = {
        "q": normal(1, tokens, heads, dim),
        "k": normal(1, tokens, heads, dim),
        "v": normal(1, tokens, heads, value_dim),
        "raw_g": normal(1, tokens, heads, dim) + gate_shift,
        "raw_beta": normal(1, tokens, heads),
        "A_log": normal(heads) * 0.5,
    }
    bias = normal(heads * dim)
    state = normal(heads, value_dim, dim)
    active = (
        l2_normalize(raw["q"][0]) * dim**-0.5,
        l2_normalize(raw["k"][0]),
        raw["v"][0],
        kda_gate(raw["raw_g"][0], raw["A_log"], bias, lower_bound),
        raw["raw_beta"][0].sigmoid(),
    )
    return raw, bias, state, active


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500])
@pytest.mark.parametrize("dim", [64, 128])
def test_chunked_form_equals_the_recurrence(tokens, dim):
    _, _, state, active = inputs(tokens, dim=dim)
    exact, exact_state = naive_kda(*active, state.double())
    out, final = chunk_kda(*active, state)
    assert out.shape == exact.shape
    assert error(out, exact) < RTOL
    assert error(final, exact_state) < RTOL


@pytest.mark.parametrize("gate_shift", [-40.0, -3.0, 40.0], ids=["keeps", "fades", "forgets"])
def test_chunked_form_at_both_ends_of_the_gate(gate_shift):
    """No decay, slow decay, and e^-5 a token: 64 tokens then decay by e^-320."""
    _, _, state, active = inputs(200, gate_shift=gate_shift)
    exact, exact_state = naive_kda(*active, state.double())
    out, final = chunk_kda(*active, state)
    assert torch.isfinite(out).all()
    assert error(out, exact) < RTOL
    assert error(final, exact_state) < RTOL


def test_chunked_form_with_repeated_keys_and_full_steps():
    """The worst conditioned triangular systems: every key the same, every beta one."""
    _, _, state, (q, k, v, g, beta) = inputs(130, gate_shift=-40.0)
    k = k[:1].expand_as(k)
    active = (q, k, v, g, torch.ones_like(beta))
    exact, exact_state = naive_kda(*active, state.double())
    out, final = chunk_kda(*active, state)
    assert error(out, exact) < RTOL
    assert error(final, exact_state) < RTOL


def test_value_and_key_channels_may_differ():
    _, _, state, active = inputs(100, dim=64, value_dim=32)
    exact, _ = naive_kda(*active, state.double())
    out, final = chunk_kda(*active, state)
    assert final.shape == (2, 32, 64)
    assert error(out, exact) < RTOL


def test_inputs_are_left_alone():
    _, _, state, active = inputs(70)
    copies = [x.clone() for x in (*active, state)]
    chunk_kda(*active, state)
    naive_kda(*active, state)
    assert all(torch.equal(a, b) for a, b in zip((*active, state), copies, strict=True))


def test_gate_has_the_documented_values():
    raw = torch.tensor([[[-1.0, 0.0, 2.0]]])
    a_log, bias = torch.tensor([0.5]), torch.tensor([0.25, 0.0, -1.0])
    x = (raw.double() + bias.double()) * 1.0
    bounded = -5.0 / (1 + torch.exp(-torch.tensor(0.5).double().exp() * x))
    free = -torch.tensor(0.5).double().exp() * torch.log1p(x.exp())
    # One rounding each of a product, an exponential and a quotient: a few parts in 2^24.
    torch.testing.assert_close(
        kda_gate(raw, a_log, bias, -5.0).double(), bounded, rtol=5e-7, atol=0
    )
    torch.testing.assert_close(kda_gate(raw, a_log, bias, None).double(), free, rtol=5e-7, atol=0)


def test_unbounded_gate_falls_back_to_the_recurrence():
    raw, bias, _, active = inputs(100, gate_shift=30.0, lower_bound=None)
    assert not chunk_is_safe(active[3])
    out, _ = ops.chunk_kda_prefill(
        **raw, g_bias=bias, lower_bound=None, use_qk_l2norm_in_kernel=True
    )
    exact, _ = naive_kda(*active, torch.zeros(2, 64, 64, dtype=torch.float64))
    assert error(out[0], exact) < RTOL


def make_cache(rows=9, heads=2, dim=64):
    """A state cache whose rows are not adjacent, as in the engine's pages, full of NaN."""
    storage = torch.full((rows, 2 * heads * dim * dim), float("nan"))
    return storage[:, : heads * dim * dim].view(rows, heads, dim, dim)


def test_prefill_of_a_batch_reads_and_writes_its_own_rows():
    """Fresh and continued sequences, of one token and of several chunks, in one call."""
    lengths, rows = [1, 64, 150, 3], [5, 2, 7, 4]
    continued = [False, True, False, True]
    raw, bias, _, _ = inputs(sum(lengths))
    cache = make_cache()
    before = torch.randn(4, 2, 64, 64, generator=torch.Generator().manual_seed(9))
    for row, state, is_old in zip(rows, before, continued, strict=True):
        if is_old:
            cache[row] = state
    out = torch.full_like(raw["v"], float("nan"))
    returned, final = ops.chunk_kda_prefill(
        **raw,
        g_bias=bias,
        lower_bound=-5.0,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor([0, 1, 65, 215, 218], dtype=torch.int32),
        out=out,
        state_cache=cache,
        state_indices=torch.tensor(rows, dtype=torch.int32),
        has_initial_state=torch.tensor(continued),
    )
    assert returned is out
    assert final is None
    start = 0
    for n, length in enumerate(lengths):
        part = slice(start, start + length)
        state = before[n] if continued[n] else torch.zeros(2, 64, 64)
        active = (
            l2_normalize(raw["q"][0, part]) * 64**-0.5,
            l2_normalize(raw["k"][0, part]),
            raw["v"][0, part],
            kda_gate(raw["raw_g"][0, part], raw["A_log"], bias, -5.0),
            raw["raw_beta"][0, part].sigmoid(),
        )
        exact, exact_state = naive_kda(*active, state.double())
        assert error(out[0, part], exact) < RTOL
        assert error(cache[rows[n]], exact_state) < RTOL
        start += length
    untouched = [row for row in range(9) if row not in rows]
    assert cache[untouched].isnan().all()


@pytest.mark.parametrize("packed", [False, True], ids=["three-tensors", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_continues_a_prefill(packed, dtype):
    """A prompt, then single tokens of several requests at once, equal to one long recurrence."""
    raw, bias, _, active = inputs(80)
    raw = {n: x.to(dtype) if n not in ("A_log",) else x for n, x in raw.items()}
    active = (
        l2_normalize(raw["q"][0]) * 64**-0.5,
        l2_normalize(raw["k"][0]),
        raw["v"][0],
        kda_gate(raw["raw_g"][0], raw["A_log"], bias, -5.0),
        raw["raw_beta"][0].float().sigmoid(),
    )
    exact, exact_state = naive_kda(*active, torch.zeros(2, 64, 64, dtype=torch.float64))
    cache = make_cache()
    head = {n: x[:, :77] if n != "A_log" else x for n, x in raw.items()}
    rows = torch.tensor([3, 0, 6], dtype=torch.int32)
    for row in (3, 6):
        ops.chunk_kda_prefill(
            **head,
            g_bias=bias,
            lower_bound=-5.0,
            use_qk_l2norm_in_kernel=True,
            state_cache=cache,
            state_indices=torch.tensor([row]),
            has_initial_state=torch.tensor([False]),
        )
    for t in (77, 78, 79):
        # The same token for two requests and, between them, for the row that is nobody's.
        step = {n: x[:, t : t + 1].repeat_interleave(3, 1) for n, x in raw.items() if n != "A_log"}
        common = {
            "raw_g": step["raw_g"],
            "raw_beta": step["raw_beta"],
            "A_log": raw["A_log"],
            "dt_bias": bias,
            "lower_bound": -5.0,
            "initial_state": cache,
        }
        if packed:
            mixed = torch.cat([step[n][0].flatten(1) for n in "qkv"], dim=-1)
            out, _ = ops.fused_recurrent_kda_packed_decode(mixed, **common, state_indices=rows)
        else:
            out, _ = ops.fused_recurrent_kda(
                step["q"],
                step["k"],
                step["v"],
                **common,
                cu_seqlens=torch.arange(4),
                ssm_state_indices=rows,
            )
        assert out.shape == (1, 3, 2, 64)
        assert out.dtype == dtype
        # bfloat16 rounds the output to 8 bits.
        tolerance = RTOL if dtype is torch.float32 else 2**-8
        assert error(out[0, 0], exact[t]) < tolerance
        assert torch.equal(out[0, 0], out[0, 2])
        assert not out[0, 1].any()
    for row in (3, 6):
        assert error(cache[row], exact_state) < RTOL
    assert cache[[0, 1, 2, 4, 5, 7, 8]].isnan().all()


def test_speculative_tokens_are_refused():
    raw, bias, state, _ = inputs(4)
    with pytest.raises(NotImplementedError, match="speculative tokens are not served"):
        ops.fused_recurrent_kda(
            **raw,
            dt_bias=bias,
            lower_bound=-5.0,
            initial_state=state.unsqueeze(0),
            cu_seqlens=torch.tensor([0, 4]),
            ssm_state_indices=torch.zeros(1, 4),
            num_accepted_tokens=torch.tensor([2]),
        )


def test_prefill_refuses_what_a_cpu_lacks():
    raw, bias, _, _ = inputs(4)
    with pytest.raises(NotImplementedError, match="no state checkpoints"):
        ops.chunk_kda_prefill(**raw, g_bias=bias, checkpoint_offsets=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="backend='gluon'"):
        ops.chunk_kda_prefill(**raw, g_bias=bias, backend="gluon")
    with pytest.raises(ValueError, match="state_indices"):
        ops.chunk_kda_prefill(**raw, g_bias=bias, state_cache=make_cache())


def test_packed_decode_names_a_wrong_width():
    raw, bias, state, _ = inputs(2)
    with pytest.raises(ValueError, match=r"expected \[N, 384\].*found \(2, 380\)"):
        ops.fused_recurrent_kda_packed_decode(
            torch.zeros(2, 380),
            raw["raw_g"],
            raw["raw_beta"],
            raw["A_log"],
            bias,
            -5.0,
            state.unsqueeze(0),
            torch.tensor([1, 1]),
        )


def test_chunk_metadata_of_uneven_sequences():
    cu_seqlens = torch.tensor([0, 1, 1, 65, 195], dtype=torch.int32)
    indices, offsets = ops.prepare_chunk_metadata_device(cu_seqlens, cu_seqlens, 64)
    assert indices.tolist() == [[0, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert offsets.tolist() == [0, 1, 1, 2, 5]
    assert indices.dtype == torch.int32
    assert offsets.dtype == torch.int64
