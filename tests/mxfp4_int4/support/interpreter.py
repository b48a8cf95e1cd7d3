# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The fused kernel under Triton's interpreter, in a process of its own: TRITON_INTERPRET changes
every kernel defined after it is set, and must not reach other tests. Run as a script it serves."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests import ROOT


class InterpretedKernel:
    """`convert_slab` and `largest_byte` of the kernel, by way of the other process.

    The interpreter's time is that of its operations, whatever their width. So by default a launch
    has one wide tile for up to 4096 groups; `as_launched` keeps the tiles of a real launch.
    `permute` is one of `triton_bits`' instructions, to be imitated; spelled out otherwise.
    """

    def __init__(self, as_launched: bool = False, permute: str = "SPELLED") -> None:
        self._as_launched = as_launched
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mxfp4_int4.support.interpreter", permute],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TRITON_INTERPRET": "1"},
        )

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def convert_slab(
        self, weight, scale, layout, scale_rule, out_weight, out_scale, unless=None
    ) -> None:
        same = out_weight.data_ptr() == weight.data_ptr()
        sent = [t.numpy() for t in (weight, scale, out_weight, out_scale)]
        guard = None if unless is None else int(unless)
        options = layout, scale_rule, same, self._as_launched, guard
        new_weight, new_scale = self._ask("convert", *sent, *options)
        out_weight.copy_(torch.from_numpy(new_weight))
        out_scale.copy_(torch.from_numpy(new_scale))

    def largest_byte(self, scale: torch.Tensor) -> int:
        return self._ask("largest", scale.numpy())

    def guard(self, scale: torch.Tensor) -> tuple[torch.Tensor, Callable[[], int]]:
        largest = torch.tensor([self.largest_byte(scale)], dtype=torch.int32)
        return largest, lambda: int(largest)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def wide_spans(groups: int, layout: str, lanes: int) -> tuple[int, int, int]:
    """SPAN, TILES and warps: whole blocks of rows in one tile."""
    block = 16 * groups if layout == "aiter" else 512
    span = block * max(1, 4096 // block)
    tile = 1 << (span - 1).bit_length()
    return span, 1, tile // lanes


def serve(permute: str) -> None:
    from mxfp4_int4 import triton_bits, triton_kernel
    from tests.mxfp4_int4.support import instructions

    triton_bits._prmt, triton_bits._v_perm = instructions.prmt, instructions.v_perm
    target = getattr(triton_bits, permute).value, 64 if permute == "V_PERM" else 32
    triton_kernel._target = lambda device: target
    real_spans = triton_kernel._spans
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints must not reach the channel
    while True:
        try:
            kind, *request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if kind == "largest":
            answer: Any = triton_kernel.largest_byte(torch.from_numpy(request[0].copy()))
        else:
            *arrays, layout, scale_rule, same, as_launched, guard = request
            triton_kernel._spans = real_spans if as_launched else wide_spans
            weight, scale, out_weight, out_scale = (torch.from_numpy(a.copy()) for a in arrays)
            if same:
                out_weight = weight.view(out_weight.dtype)
            unless = None if guard is None else torch.tensor([guard], dtype=torch.int32)
            triton_kernel.convert_slab(
                weight, scale, layout, scale_rule, out_weight, out_scale, unless
            )
            answer = out_weight.numpy(), out_scale.numpy()
        pickle.dump(answer, channel)
        channel.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
