# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""KDA prefill on a CPU: the chunked form against the token-by-token recurrence.

    python benchmarks/kda_cpu.py

Both are first held against the recurrence in float64; a form that is wrong is not timed. Times are
medians and quartiles over rounds on the same inputs, which stay in the cache as far as they fit.
"""

import argparse
import time
from collections.abc import Callable

import torch
from _options import json_file, positive
from _result import machine, spread, write
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


def round_times(forms: list[Callable], inputs: Inputs, rounds: int) -> list[list[float]]:
    """Seconds of each form in each round.

    The forms take turns, so that both see the same load. A turn is three runs, of which the best
    counts: the first ones pay for memory that the allocator has given back in the other's turn.
    """
    seconds: list[list[float]] = [[] for _ in forms]
    for _ in range(rounds):
        for form, found in zip(forms, seconds, strict=True):
            turn = []
            for _ in range(3):
                start = time.perf_counter()
                form(*inputs)
                turn.append(time.perf_counter() - start)
            found.append(min(turn))
    return seconds


def milliseconds(found: dict[str, float]) -> str:
    """Median and quartiles, for people."""
    low, middle, high = (1e3 * found[key] for key in ("low", "median", "high"))
    return f"{middle:.1f} ms ({low:.1f}..{high:.1f})"


def main() -> None:
    """Print one table."""
    vllm_overlay.activate()
    from vllm.models.kimi_k3.cpu.kda_chunk import chunk_kda
    from vllm.models.kimi_k3.cpu.kda_naive import naive_kda

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--dim", type=positive, default=128)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--json", type=json_file, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    table = Table(
        title=f"KDA prefill, {options.heads} heads x {options.dim}, float32, "
        f"{options.threads} threads, {options.rounds} rounds"
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
    results = {}
    for tokens in options.tokens:
        inputs = make_inputs(tokens, options.heads, options.dim)
        *active, state = inputs
        exact = naive_kda(*active, state.double())
        errors = [worst_error(form, inputs, exact) for form in (naive_kda, chunk_kda)]
        if max(errors) > RTOL:
            raise SystemExit(f"{tokens} tokens: errors {errors} exceed {RTOL}; nothing is timed")
        found = round_times([naive_kda, chunk_kda], inputs, options.rounds)
        ratio = spread([slow / fast for slow, fast in zip(*found, strict=True)])
        slow, fast = map(spread, found)
        results[tokens] = {"recurrence": slow, "chunked": fast, "ratio": ratio, "errors": errors}
        table.add_row(
            f"{tokens:,}",
            *(f"{e:.1e}" for e in errors),
            milliseconds(slow),
            milliseconds(fast),
            f"{ratio['median']:.1f} ({ratio['low']:.1f}..{ratio['high']:.1f})",
        )
    Console().print(table)
    write(options.json, "kda_cpu", machine(options.threads), results)


if __name__ == "__main__":
    main()
