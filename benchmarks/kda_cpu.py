# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""KDA prefill on a CPU: the chunked form against the token-by-token recurrence.

    python benchmarks/kda_cpu.py

Both are first held against the recurrence in float64; a form that is wrong is not timed. Times are
the best of several runs on the same inputs, which stay in the cache as far as they fit.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import vllm_overlay

Inputs = tuple[torch.Tensor, ...]
# As in tests/models/kimi_k3/cpu/test_kda.py: float32 sums of 128 products, a handful in a row.
RTOL = 5e-6


def make_inputs(tokens: int, heads: int, dim: int) -> Inputs:
    """Random activated q, k, v, g, beta and a state, as a layer of random weights makes them."""
    from vllm.models.kimi_k3.cpu.kda_naive import kda_gate, l2_normalize

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return (
        l2_normalize(normal(tokens, heads, dim)) * dim**-0.5,
        l2_normalize(normal(tokens, heads, dim)),
        normal(tokens, heads, dim),
        kda_gate(normal(tokens, heads, dim), normal(heads), None, -5.0),
        normal(tokens, heads).sigmoid(),
        normal(heads, dim, dim),
    )


def worst_error(form: Callable, inputs: Inputs, exact: Inputs) -> float:
    """Largest difference of output and state, over the largest exact value of each."""
    return max(
        ((a.double() - e).abs().max() / e.abs().max()).item()
        for a, e in zip(form(*inputs), exact, strict=True)
    )


def best_times(forms: list[Callable], inputs: Inputs, repeats: int) -> list[float]:
    """Seconds of each form's fastest run.

    The forms take turns, so that both see the same load. A turn is three runs: the first ones pay
    for memory that the allocator has given back during the other form's turn.
    """
    best = [float("inf")] * len(forms)
    for _ in range(repeats):
        for i, form in enumerate(forms):
            for _ in range(3):
                start = time.perf_counter()
                form(*inputs)
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    """Print one table."""
    vllm_overlay.activate()
    from vllm.models.kimi_k3.cpu.kda_chunk import chunk_kda
    from vllm.models.kimi_k3.cpu.kda_naive import naive_kda

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    table = Table(
        title=f"KDA prefill, {options.heads} heads x {options.dim}, float32, "
        f"{options.threads} threads, best of {3 * options.repeats}"
    )
    for column in (
        "tokens",
        "error, recurrence",
        "error, chunked",
        "recurrence",
        "chunked",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for tokens in options.tokens:
        inputs = make_inputs(tokens, options.heads, options.dim)
        *active, state = inputs
        exact = naive_kda(*active, state.double())
        errors = [worst_error(form, inputs, exact) for form in (naive_kda, chunk_kda)]
        if max(errors) > RTOL:
            raise SystemExit(f"{tokens} tokens: errors {errors} exceed {RTOL}; nothing is timed")
        slow, fast = best_times([naive_kda, chunk_kda], inputs, options.repeats)
        table.add_row(
            f"{tokens:,}",
            *(f"{e:.1e}" for e in errors),
            f"{slow * 1e3:.1f} ms",
            f"{fast * 1e3:.1f} ms",
            f"{slow / fast:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
