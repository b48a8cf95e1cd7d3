# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Rows of bytes: what `convert_experts` gives and refuses, with torch and without."""

import subprocess
import sys

import pytest
import torch

from mxfp4_int4 import ConversionInputError, convert_experts, native_library
from mxfp4_int4.rows import convert_rows


@pytest.fixture(params=["compiled", "torch"])
def by(request, monkeypatch) -> str:
    """Which of the two does the work."""
    if request.param == "compiled":
        request.getfixturevalue("compiled")
    monkeypatch.setenv(native_library.VARIABLE, "1" if request.param == "compiled" else "0")
    return request.param


def random_rows(rows: int, groups: int) -> tuple[bytearray, bytearray]:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows * groups * 16,), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 253, (rows * groups,), generator=generator, dtype=torch.uint8)
    return bytearray(codes.numpy().tobytes()), bytearray(scales.numpy().tobytes())


def as_experts(codes: bytearray, scales: bytearray, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        torch.frombuffer(part, dtype=torch.uint8).view(1, rows, -1) for part in (codes, scales)
    )


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 5), (16, 2), (31, 33)])
def test_the_bits_of_convert_experts(by, rows, groups, scale_rule):
    codes, scales = random_rows(rows, groups)
    out = convert_experts(
        *as_experts(codes, scales, rows), layout="pack_quantized", scale_rule=scale_rule
    )
    new, bits = convert_rows(memoryview(codes), memoryview(scales), rows, scale_rule)
    assert bytes(new) == out.weight.numpy().tobytes()
    assert bytes(bits) == out.scale.view(torch.int16).numpy().tobytes()


def test_read_only_bytes(compiled):
    codes, scales = random_rows(4, 3)
    expected = convert_rows(codes, scales, 4)
    found = convert_rows(bytes(codes), memoryview(bytes(scales)), 4)
    assert tuple(map(bytes, found)) == tuple(map(bytes, expected))


def test_no_values(by):
    assert tuple(map(bytes, convert_rows(b"", b"", 3))) == (b"", b"")


@pytest.mark.parametrize(
    ("byte", "code", "count"), [(255, 0, 1), (255, 7, 3), (254, 4, 1), (253, 6, 2), (253, 15, 1)]
)
def test_the_errors_of_convert_experts(by, byte, code, count):
    """The place by name, and nothing written."""
    codes, scales = random_rows(7, 5)
    for group in range(11, 11 + count):
        scales[group] = byte
        codes[16 * group : 16 * group + 16] = bytes(15) + bytes([code << 4])
    with pytest.raises(ConversionInputError) as expected:
        convert_experts(*as_experts(codes, scales, 7), layout="pack_quantized")
    with pytest.raises(ConversionInputError) as found:
        convert_rows(codes, scales, 7)
    assert str(found.value) == str(expected.value)
    assert str(found.value).startswith("expert 0, row 2, group 1 (values 32 to 63 along K): ")


@pytest.mark.parametrize(("byte", "code"), [(254, 3), (253, 5), (253, 13), (252, 7)])
def test_the_largest_values_that_bf16_holds(by, byte, code):
    codes, scales = bytearray([code] * 16), bytearray([byte])
    new, _ = convert_rows(codes, scales, 1)
    out = convert_experts(*as_experts(codes, scales, 1), layout="pack_quantized")
    assert bytes(new) == out.weight.numpy().tobytes()


@pytest.mark.parametrize(("codes", "scales", "rows"), [(31, 2, 1), (32, 2, 0), (48, 3, 2)])
def test_sizes_that_do_not_fit(by, codes, scales, rows):
    with pytest.raises(ConversionInputError, match=f"received {codes} and {scales} bytes for"):
        convert_rows(bytearray(codes), bytearray(scales), rows)


def test_unknown_rule(by):
    with pytest.raises(ConversionInputError, match="scale_rule: expected one of"):
        convert_rows(bytearray(16), bytearray(1), 1, "best")


WITHOUT_TORCH = """
import sys
from kimi_k3.convert import kernel
kernel.check_device("cpu")
codes, scales = memoryview(bytearray(64)), memoryview(bytearray(4))
new, bits = kernel.convert_rows(codes, scales, 2, "mse", "cpu")
try:
    kernel.convert_rows(memoryview(bytearray(16)), memoryview(b"\\xff"), 1, "mse", "cpu")
except ValueError as error:
    assert "expert 0, row 0, group 0" in str(error), error
else:
    raise SystemExit("NaN was converted")
print(len(new), len(bits), "torch" in sys.modules, "numpy" in sys.modules)
"""


def test_the_converter_needs_no_torch(compiled):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "64 8 False False\n"
