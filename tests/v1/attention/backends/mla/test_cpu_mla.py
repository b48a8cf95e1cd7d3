# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Block sizes of MLA on a CPU."""

import pytest

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend


@pytest.mark.parametrize("block_size", [None, 16, 32, 128, 1024])
def test_multiples_of_the_kernels_page_are_supported(block_size):
    assert CPUMLABackend.supports_block_size(block_size)


@pytest.mark.parametrize("block_size", [1, 8, 24, 100])
def test_other_sizes_are_not(block_size):
    assert not CPUMLABackend.supports_block_size(block_size)


def test_the_kernel_keeps_its_page():
    assert CPUMLABackend.get_supported_kernel_block_sizes() == [16]
