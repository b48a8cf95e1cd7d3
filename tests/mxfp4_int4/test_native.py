# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The compiled code: when it is made, and that whatever goes wrong ends in the same bits."""

import itertools
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mxfp4_int4 import (
    ConversionInputError,
    convert,
    convert_experts,
    native,
    native_build,
)
from mxfp4_int4.errors import NativeCodeError
from mxfp4_int4.layouts import (
    AITER_ROWS,
    scale_shape,
    weight_spec,
)
from tests import ROOT

COMPILER = next(filter(None, map(shutil.which, native_build.COMPILERS)), None)
MACROS = 'case "$*" in *-dM*) exec $REAL "$@";; esac'  # tells its macros like the real one
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged at info, by a handler here: vLLM's loggers hand nothing on to the root."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    before = native.logger.level
    native.logger.addHandler(handler)
    native.logger.setLevel(logging.INFO)
    yield lines
    native.logger.setLevel(before)
    native.logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path) -> Path:
    """A process that has converted nothing, with an empty cache. -> where its library goes."""
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "kimi_k3" / "mxfp4_int4"


def random_experts(shape=(2, 32, 128), seed=0):
    e, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (e, n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 253, (e, n, k // 32), generator=generator, dtype=torch.uint8)
    return weight, scale


def script(folder: Path, text: str) -> Path:
    """A compiler of our own. $REAL is the real one."""
    path = folder / "some-cc"
    path.write_text(f"#!/bin/sh\nREAL={COMPILER}\n{text}\n")
    path.chmod(0o755)
    return path


def check_fallback(said: list[str], reason: str) -> None:
    """Said once, with the reason; the same bits as ever; an error for those who insist."""
    weight, scale = random_experts()
    expected = convert._convert(weight, scale, "aiter", "mse", 8, False, False, convert.LOOKUP)
    for _ in range(2):
        assert not native.is_worth(native.BUILD_BYTES)
        assert torch.equal(convert_experts(weight, scale, layout="aiter").weight, expected.weight)
    (line,) = [line for line in said if "by torch" in line]
    assert reason in line
    before = weight.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, "1")
        with pytest.raises(NativeCodeError) as caught:
            convert_experts(weight, scale, layout="aiter", in_place=True)
    assert reason in str(caught.value)
    assert torch.equal(weight, before)


def test_no_compiler(fresh, monkeypatch, tmp_path, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    check_fallback(said, "no C compiler: none of cc, gcc, clang is there, and CC is not set")


def test_cc_names_nothing(fresh, monkeypatch, said):
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    check_fallback(said, "CC is 'no-such-compiler -O1', which is not there")


@needs_compiler
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'cc1: error: out of order' >&2; exit 7", "ended with 7: cc1: error: out of order"),
        (f'{MACROS}; echo "x.c:1: error: no" >&2; exit 1', "ended with 1: x.c:1: error: no"),
        # What it makes is no library, or has other symbols.
        (f'{MACROS}\nwhile [ "$1" != -o ]; do shift; done; echo junk > "$2"', "native-"),
        ('$REAL -Dconvert=other "$@"', "convert"),
    ],
    ids=["no macros", "no code", "junk", "no symbol"],
)
def test_broken_compilers(text, reason, fresh, monkeypatch, tmp_path, said):
    monkeypatch.setenv("CC", str(script(tmp_path, text)))
    check_fallback(said, reason)
    assert list(fresh.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize(
    ("wrong", "right"),
    [("0x33333333", "0x33333331"), ("128 \\* byte", "129 * byte"), ("4, 4, 5, 5", "4, 5, 4, 5")],
    ids=["planes", "absmax scales", "plain order"],
)
def test_a_compiler_that_makes_wrong_code(wrong, right, fresh, monkeypatch, tmp_path, said):
    text = f'{MACROS}\nsed "s/{wrong}/{right}/" | $REAL "$@"'
    monkeypatch.setenv("CC", str(script(tmp_path, text)))
    check_fallback(said, "other bits than the definition")
    assert list(fresh.iterdir()) == []


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    check_fallback(said, "Not a directory")


@needs_compiler
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written(fresh, said):
    fresh.mkdir(parents=True)
    fresh.chmod(0o500)
    check_fallback(said, "Permission denied")


def test_a_cache_that_another_user_owns(fresh, monkeypatch, said):
    native_build.cache_folder()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    check_fallback(said, "not a folder or file that only this user, 12345, can write")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_that_others_can_write(mode, fresh, said):
    native_build.cache_folder().chmod(mode)
    check_fallback(said, f"{fresh} ({stat.filemode(stat.S_IFDIR | mode)}")


def test_a_cache_that_is_a_link(fresh, tmp_path, said):
    fresh.parent.mkdir(parents=True)
    fresh.symlink_to(tmp_path)
    check_fallback(said, "remove it, or set VLLM_CACHE_ROOT to another place")


@needs_compiler
def test_a_library_that_others_can_write(fresh, said):
    native.library()
    (made,) = fresh.iterdir()
    made.chmod(0o777)
    native._state = native._State()
    check_fallback(said, str(made))


@needs_compiler
def test_built_once_and_then_loaded(fresh, monkeypatch, tmp_path, said):
    log = tmp_path / "calls"
    monkeypatch.setenv("CC", str(script(tmp_path, f'echo "$@" >> {log}\nexec $REAL "$@"')))
    native.library()
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    (made,) = fresh.iterdir()
    assert log.read_text().count(" -o ") == 1
    assert "compiled the CPU conversion" in "".join(said)
    native_build._command_and_name.cache_clear()
    native._state = native._State()
    assert native.library(build=False) is not None
    assert log.read_text().count(" -o ") == 1
    assert list(fresh.iterdir()) == [made]


@needs_compiler
def test_a_damaged_library_is_built_anew(fresh, said):
    native.library()
    (made,) = fresh.iterdir()
    made.unlink()  # it is mapped: writing into it would change the code that is loaded
    made.write_bytes(b"junk")
    native._state = native._State()
    assert native.library() is not None
    assert f"{made} is not used" in "".join(said)
    assert made.read_bytes()[:4] == b"\x7fELF"


@needs_compiler
def test_a_name_for_each_compiler_and_cpu(monkeypatch, tmp_path):
    names = set()
    for macro in ("", "-D__AVX9__", "-D__VERSION__=99"):
        monkeypatch.setenv("CC", f"{COMPILER} {macro}")
        native_build.build_library(lambda path: names.add(path.name))
    monkeypatch.setenv("CC", str(script(tmp_path, 'exec $REAL "$@"')))
    native_build.build_library(lambda path: names.add(path.name))
    assert len(names) == 4


def test_other_machines(monkeypatch, said):
    monkeypatch.setattr(native_build.platform, "machine", lambda: "s390x")
    monkeypatch.setattr(native_build, "find_compiler", lambda: ["a-compiler"])
    check_fallback(said, "x86_64 and aarch64, not for s390x")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert native_build.cache_folder() == tmp_path / "xdg/vllm/kimi_k3/mxfp4_int4"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert native_build.cache_folder() == tmp_path / "home/.cache/vllm/kimi_k3/mxfp4_int4"


@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_the_switch_takes_0_and_1(value, monkeypatch):
    weight, scale = random_experts()
    before = weight.clone()
    monkeypatch.setenv(native.VARIABLE, value)
    with pytest.raises(ConversionInputError, match=rf"VLLM_KIMI_K3_NATIVE.*0 .*1 .*'{value}'"):
        convert_experts(weight, scale, layout="aiter", in_place=True)
    assert torch.equal(weight, before)


def test_switched_off(monkeypatch, fresh):
    monkeypatch.setenv(native.VARIABLE, "0")
    assert not native.is_worth(1 << 40)
    assert not fresh.exists()


@needs_compiler
def test_switched_on_does_not_wait(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "1")
    assert convert.pick_implementation(torch.device("cpu"), 1) is convert.NATIVE
    monkeypatch.setenv(native.VARIABLE, "0")
    assert convert.pick_implementation(torch.device("cpu"), 1 << 40) is convert.LOOKUP


@needs_compiler
def test_few_bytes_wait_for_no_compiler(fresh):
    """Nothing is looked for, then only what is there is loaded, then it is built."""
    assert not native.is_worth(native.LOAD_BYTES - 1)
    assert not fresh.exists()
    assert not native.is_worth(1)
    assert list(fresh.iterdir()) == []
    assert not native.is_worth(native.BUILD_BYTES - native.LOAD_BYTES - 1)
    assert native.is_worth(1)
    assert native.is_worth(1)
    native._state = native._State()
    assert not native.is_worth(native.LOAD_BYTES - 1)
    assert native.is_worth(1)


AT_ONCE = """
import sys
from mxfp4_int4 import native
sys.stdin.readline()
native.library()
print("LOADED")
"""


@needs_compiler
def test_processes_at_once(fresh):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", AT_ONCE]
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in processes] == ["LOADED\n"] * 3
    assert len(list(fresh.iterdir())) == 1


@needs_compiler
@pytest.mark.slow
def test_under_sanitizers(tmp_path):
    """As a program of its own: buffers of the very size, every layout, in place and not."""
    source = ROOT / "tests/mxfp4_int4/support/native_main.c"
    program, machine = tmp_path / "program", native_build.platform.machine()
    flags = f"-std=c11 -O3 {native_build.CPU_FLAGS[machine]} -g -Wall -Wextra -Werror"
    text = native_build.program() + source.read_text()
    sanitizers = "-fsanitize=address,undefined -fno-sanitize-recover=all"
    built = subprocess.run(
        [COMPILER, *flags.split(), *sanitizers.split(), "-o", program, "-x", "c", "-"],
        input=text,
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
