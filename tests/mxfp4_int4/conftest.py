# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Every implementation of the conversion, for the tests that run over all of them."""

from collections.abc import Callable, Iterator

import pytest
import torch

from mxfp4_int4 import ConvertedExperts, convert, native_library

Convert = Callable[..., ConvertedExperts]


def _interpreted(as_launched: bool) -> Iterator[convert.Implementation]:
    pytest.importorskip("triton")
    from tests.mxfp4_int4.support.interpreter import InterpretedKernel

    kernel = InterpretedKernel(as_launched)
    yield convert.Implementation(
        kernel.convert_slab,
        lambda layout, groups: layout != "plain",
        kernel.largest_byte,
        kernel.guard,
    )
    kernel.close()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[convert.Implementation]:
    yield from _interpreted(as_launched=False)


@pytest.fixture(scope="session")
def interpreted_as_launched() -> Iterator[convert.Implementation]:
    yield from _interpreted(as_launched=True)


@pytest.fixture(scope="session")
def compiled() -> convert.Implementation:
    """The compiled code, where this installation has it."""
    if native_library.library() is None:
        pytest.skip("this installation has no compiled code")
    return convert.NATIVE


@pytest.fixture(
    params=[
        "naive",
        "lookup",
        "native",
        "triton-interpreter",
        pytest.param("triton-gpu", marks=pytest.mark.gpu),
        pytest.param("lookup-gpu", marks=pytest.mark.gpu),
    ]
)
def converted_by(request) -> Convert:
    """`convert_experts` by one implementation, tensors moved to its device and back."""
    name = request.param
    device = "cpu"
    if name.endswith("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("no CUDA or ROCm GPU here")
        device = "cuda"
    chosen = {
        "naive": lambda: convert.NAIVE,
        "lookup": lambda: convert.LOOKUP,
        "native": lambda: request.getfixturevalue("compiled"),
        "triton-interpreter": lambda: request.getfixturevalue("interpreted"),
        "triton-gpu": lambda: convert.pick_implementation(torch.device("cuda")),
        "lookup-gpu": lambda: convert.LOOKUP,
    }[name]()

    def run(
        weight: torch.Tensor,
        scale: torch.Tensor,
        *,
        layout: str,
        scale_rule: str = "mse",
        chunk_experts: int = 8,
        in_place: bool = False,
        collect_stats: bool = False,
    ) -> ConvertedExperts:
        out = convert._convert(
            weight.to(device),
            scale.to(device),
            layout,
            scale_rule,
            chunk_experts,
            in_place,
            collect_stats,
            chosen,
        )
        return out._replace(weight=out.weight.cpu(), scale=out.scale.cpu())

    return run


@pytest.fixture(params=["mse", "absmax"])
def scale_rule(request) -> str:
    return request.param


@pytest.fixture(params=["aiter", "pack_quantized", "plain"])
def layout(request) -> str:
    return request.param
