# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The fused kernel's ways to permute bytes give the same codes, with the instructions imitated."""

import pytest
import torch

from mxfp4_int4 import convert

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=["PRMT", "V_PERM"])
def kernel(request):
    from tests.mxfp4_int4.support.interpreter import InterpretedKernel

    kernel = InterpretedKernel(permute=request.param)
    yield convert.Implementation(
        kernel.convert_slab, lambda layout, groups: layout != "plain", kernel.largest_byte
    )
    kernel.close()


@pytest.mark.parametrize("rule", ["mse", "absmax"])
@pytest.mark.parametrize("layout", ["aiter", "pack_quantized", "plain"])
def test_every_instruction_gives_the_definitions_codes(kernel, layout, rule):
    generator = torch.Generator().manual_seed(9)
    weight = torch.randint(0, 256, (2, 32, 256), dtype=torch.uint8, generator=generator)
    # Groups of small codes as well, which other candidates suit.
    weight[1] &= torch.randint(0, 256, (32, 1), dtype=torch.uint8, generator=generator) | 0x88
    scale = torch.randint(98, 140, (2, 32, 16), dtype=torch.uint8, generator=generator)
    found, wanted = (
        convert._convert(weight, scale, layout, rule, 8, False, False, implementation)
        for implementation in (kernel, convert.NAIVE)
    )
    assert torch.equal(found.weight, wanted.weight)
    assert torch.equal(found.scale.view(torch.int16), wanted.scale.view(torch.int16))
