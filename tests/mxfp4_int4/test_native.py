# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The compiled code: each of its versions gives the definition's bits, and touches only its own."""

import itertools
import platform
import shutil
import subprocess

import pytest
import torch

from mxfp4_int4 import convert, native, native_library, native_numbers
from mxfp4_int4.errors import NativeCodeError
from mxfp4_int4.layouts import AITER_ROWS, scale_shape, weight_spec
from tests import ROOT

COMPILER = shutil.which("cc")


def random_experts(shape=(2, 32, 128), seed=0):
    e, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (e, n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 253, (e, n, k // 32), generator=generator, dtype=torch.uint8)
    return weight, scale


def test_every_version_gives_the_same_bits(compiled, layout, scale_rule, monkeypatch):
    """Of those that this CPU can run. 15 rows do not fill the last block of lanes."""
    best = native_library.library()
    n = 16 if layout == "aiter" else 15
    weight, scale = random_experts((40, n, 128))
    weight[20:] &= torch.arange(20, dtype=torch.uint8)[:, None, None] | 0x88  # few kinds of codes
    arguments = weight, scale, layout, scale_rule, 8, False, False
    expected = convert._convert(*arguments, convert.NAIVE)
    for level in range(1, best.level + 1):
        monkeypatch.setattr(
            native, "library", lambda level=level: native_library.Library(best.code, level)
        )
        found = convert._convert(*arguments, compiled)
        assert torch.equal(found.weight, expected.weight), level
        assert torch.equal(found.scale.view(torch.int16), expected.scale.view(torch.int16)), level


def test_switched_off(compiled, monkeypatch):
    monkeypatch.setenv(native_library.VARIABLE, "0")
    with pytest.raises(NativeCodeError, match="switched off"):
        native.largest_byte(torch.zeros(1, dtype=torch.uint8))


@pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
@pytest.mark.slow
def test_under_sanitizers(tmp_path):
    """As a program of its own: buffers of the very size, every layout, in place and not."""
    program = tmp_path / "program"
    (tmp_path / "native_numbers.h").write_text(native_numbers.header())
    flags = "-std=c11 -O3 -g -Wall -Wextra -Werror -fsanitize=address,undefined"
    flags += " -msse4.2" if platform.machine() == "x86_64" else ""
    built = subprocess.run(
        [
            *(COMPILER, *flags.split(), "-fno-sanitize-recover=all", "-o", program),
            *("-I", tmp_path, "-I", ROOT / "mxfp4_int4"),
            ROOT / "tests/mxfp4_int4/support/native_main.c",
        ],
        text=True,
        capture_output=True,
    )
    if "cannot find" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    shapes = [(1, 1, 1), (2, 3, 3), (1, 7, 5), (1, 16, 2), (3, 16, 6), (2, 48, 12), (5, 31, 32)]
    for shape, (number, layout), (mse, rule), in_place in itertools.product(
        shapes,
        enumerate(("aiter", "pack_quantized", "plain")),
        enumerate(("absmax", "mse")),
        (0, 1),
    ):
        e, n, g = shape
        if (layout == "aiter" and (n % AITER_ROWS or g % 2)) or (layout == "plain" and in_place):
            continue
        weight, scale = random_experts((e, n, 32 * g), seed=n)
        size, dtype = weight_spec(layout, (e, n, 32 * g))
        out = torch.empty(size, dtype=dtype)
        bits = torch.empty(scale_shape(layout, (e, n, 32 * g)), dtype=torch.int16)
        convert.NAIVE.convert(weight, scale, layout, rule, out, bits)
        done = subprocess.run(
            [program, *map(str, (e, n, g, number, mse, in_place))],
            input=weight.numpy().tobytes() + scale.numpy().tobytes(),
            capture_output=True,
            env={},  # vLLM's CPU platform preloads libraries, which must come after the sanitizer
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout == out.numpy().tobytes() + bits.numpy().tobytes()
