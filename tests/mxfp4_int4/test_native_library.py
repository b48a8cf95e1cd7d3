# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The extension is used where it is; without it torch gives the same bits, and it is said why."""

import ctypes
import logging
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from mxfp4_int4 import ConversionInputError, convert, convert_experts, native_library, rows
from mxfp4_int4.errors import NativeCodeError


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged at info, by a handler here: vLLM's loggers hand nothing on to the root."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    before = native_library.logger.level
    native_library.logger.addHandler(handler)
    native_library.logger.setLevel(logging.INFO)
    yield lines
    native_library.logger.setLevel(before)
    native_library.logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> Iterator[None]:
    """A process that has not looked for the library yet."""
    monkeypatch.delenv(native_library.VARIABLE, raising=False)
    native_library._load.cache_clear()
    yield
    native_library._load.cache_clear()


def experts():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (2, 32, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 253, (2, 32, 4), generator=generator, dtype=torch.uint8)
    return weight, scale


def spec_of(file: object) -> ModuleSpec:
    return ModuleSpec("mxfp4_int4._native", None, origin=str(file))


@pytest.mark.parametrize("kind", ["not built", "no library", "another library", "an old CPU"])
def test_without_it_torch_gives_the_same_bits(kind, monkeypatch, tmp_path, said):
    """Said once, with the reason; an error for those who insist."""
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"junk")
    mapped = Path("/proc/self/maps").read_text().splitlines()
    other = next(line.split()[-1] for line in mapped if "/libc" in line)
    if kind == "an old CPU":
        if native_library.library() is None:
            pytest.skip("this installation has no compiled code")
        native_library._load.cache_clear()

        class Old(ctypes.CDLL):
            def cpu_level(self) -> int:
                return 0

        monkeypatch.setattr(native_library.ctypes, "CDLL", Old)
    else:
        found = {"not built": None, "no library": spec_of(junk), "another library": spec_of(other)}
        monkeypatch.setattr(native_library, "find_spec", lambda name: found[kind])
    reason = {
        "not built": "made without a C compiler",
        "no library": f"{junk}: ",
        "another library": f"{other}: ",
        "an old CPU": "no SSE4.2",
    }[kind]
    weight, scale = experts()
    expected = convert._convert(weight, scale, "aiter", "mse", 8, False, False, convert.NAIVE)
    for _ in range(2):
        assert native_library.library() is None
        assert torch.equal(convert_experts(weight, scale, layout="aiter").weight, expected.weight)
    (line,) = [line for line in said if "by torch" in line]
    assert reason in line
    before = weight.clone()
    monkeypatch.setenv(native_library.VARIABLE, "1")
    with pytest.raises(NativeCodeError) as caught:
        convert_experts(weight, scale, layout="aiter", in_place=True)
    assert reason in str(caught.value)
    with pytest.raises(NativeCodeError):
        rows.convert_rows(bytes(32), bytes(2), 1)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_the_switch_takes_0_and_1(value, monkeypatch):
    weight, scale = experts()
    before = weight.clone()
    monkeypatch.setenv(native_library.VARIABLE, value)
    with pytest.raises(ConversionInputError, match=rf"VLLM_KIMI_K3_NATIVE.*0 .*1 .*'{value}'"):
        convert_experts(weight, scale, layout="aiter", in_place=True)
    assert torch.equal(weight, before)


def test_the_switch_chooses(compiled, monkeypatch, said):
    cpu = torch.device("cpu")
    for value, chosen in (("1", convert.NATIVE), ("", convert.NATIVE), ("0", convert.LOOKUP)):
        monkeypatch.setenv(native_library.VARIABLE, value)
        assert convert.pick_implementation(cpu) is chosen
    assert said == []
