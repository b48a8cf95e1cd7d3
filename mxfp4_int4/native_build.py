# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""native.c to a shared library in the user's cache: its numbers, the compiler, the folder.

One file for each source, compiler and kind of CPU, so that machines can share a home; built under
another name, tried, and then renamed, so that processes can share it. Converts nothing.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from .definition import (
    ABSMAX_FLOOR_BITS,
    ABSMAX_FLOOR_BYTE,
    ABSMAX_SCALE_OFFSET,
    CANDIDATES,
    MAGNITUDES,
    candidate_code,
    candidate_error,
)
from .errors import NativeCodeError
from .layouts import LAYOUTS
from .lookup_tables import FLOOR_BYTES, KEY, SIGNED, absmax_maps, mse_maps

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
# By machine: the flag for the CPU at hand. native.c is written for these two.
CPU_FLAGS = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared")
SECONDS = 120  # for a compiler that takes one or two


def _braces(values: object) -> str:
    if isinstance(values, list | tuple):
        return "{" + ", ".join(map(_braces, values)) + "}"
    return str(values)


def _code_tables(maps: list[dict[int, int]]) -> str:
    """By layout and map: the new code of each e2m1 code as it lies in a byte when it stands in the
    source's low nibble, and in its high one."""
    by_code = [[codes.get(v, 0) for v in SIGNED] for codes in maps]
    tables = {}
    for layout, offset in (("aiter", 0), ("pack_quantized", 8)):
        nibbles = [[(q + offset) & 15 for q in row] for row in by_code]
        tables[layout] = [(row, [q << 4 for q in row]) for row in nibbles]
    tables["plain"] = [([q & 255 for q in row],) * 2 for row in by_code]
    return _braces([tables[layout] for layout in LAYOUTS])


def numbers() -> str:
    """The numbers of `definition` as native.c wants them."""
    values = (1, 2, 3, 4, 6, 8, -8, 12, -12)
    candidates = " ".join(
        f"TRY({i}, {', '.join(str(KEY * candidate_error(v, c)) for v in values)})"
        for i, c in enumerate(CANDIDATES)
    )
    # |code| by magnitude on the side where it reaches 8, four bits each
    sizes = [
        sum(abs(candidate_code(-m if c > 0 else m, c)) << (4 * i) for i, m in enumerate(MAGNITUDES))
        for c in CANDIDATES
    ]
    absmax, mse = absmax_maps(), mse_maps()
    return "\n".join(
        (
            "#include <stdint.h>",
            "typedef uint8_t Codes[2][16];",
            f"#define CANDIDATES(TRY) {candidates}",
            f"#define NEGATIVE {sum((c < 0) << i for i, c in enumerate(CANDIDATES))}",
            f"#define ABSMAX_FLOOR_BITS {ABSMAX_FLOOR_BITS}",
            f"#define FLOOR_FIRST {FLOOR_BYTES[0]}",
            f"#define FLOOR_LAST {FLOOR_BYTES[-1]}",
            f"#define FLOOR_MAPS {len(MAGNITUDES)}",
            f"static const uint32_t MSE_SIZES[] = {_braces([f'{size}u' for size in sizes])};",
            f"static const int32_t ABSMAX_FLOOR_BYTE[] = {_braces(ABSMAX_FLOOR_BYTE)};",
            f"static const int32_t ABSMAX_OFFSET[] = {_braces(ABSMAX_SCALE_OFFSET)};",
            f"static const Codes MSE_CODES[][{len(mse)}] = {_code_tables(mse)};",
            f"static const Codes ABSMAX_CODES[][{len(absmax)}] = {_code_tables(absmax)};",
            "",
        )
    )


def program() -> str:
    """All of the C source. Messages of a compiler name native.c and its own lines."""
    return f'{numbers()}#line 1 "native.c"\n{SOURCE.read_text()}'


def find_compiler() -> list[str]:
    """The command of $CC, which may have arguments, or else of the first compiler there is."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    raise NativeCodeError(
        f"no C compiler: CC is {shlex.join(named)!r}, which is not there"
        if named
        else f"no C compiler: none of {', '.join(COMPILERS)} is there, and CC is not set"
    )


def _run(command: list[str], text: str) -> str:
    """Standard output of a compiler that reads `text`."""
    try:
        done = subprocess.run(
            [*command, "-x", "c", "-"],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NativeCodeError(f"{command[0]} took more than {SECONDS} seconds") from None
    if done.returncode:
        said = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr.strip())
        raise NativeCodeError(f"{command[0]} ended with {done.returncode}: {said[:300]}")
    return done.stdout


def cache_folder() -> Path:
    """Our own folder in vLLM's cache, made where it is missing. Only its owner may write to it:
    what lies there is loaded into the process."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("VLLM_CACHE_ROOT") or f"{home}/vllm"
    folder = Path(root).expanduser().absolute() / "kimi_k3" / "mxfp4_int4"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_owner(folder, stat.S_ISDIR)
    return folder


def _check_owner(path: Path, kind: Callable[[int], bool]) -> None:
    found = path.lstat()
    if not kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NativeCodeError(
            f"{path} ({stat.filemode(found.st_mode)}, owner {found.st_uid}) is not a folder or "
            f"file that only this user, {os.geteuid()}, can write: remove it, or set "
            "VLLM_CACHE_ROOT to another place"
        )


@lru_cache(maxsize=8)
def _command_and_name(compiler: tuple[str, ...]) -> tuple[list[str], str]:
    """The command that compiles, and the name of what it makes. A compiler's own macros tell its
    version, and what the CPU at hand can do."""
    machine = platform.machine()
    if machine not in CPU_FLAGS:
        raise NativeCodeError(f"native.c is for {' and '.join(CPU_FLAGS)}, not for {machine}")
    command = [*compiler, *FLAGS, CPU_FLAGS[machine]]
    macros = _run([*command, "-dM", "-E"], "")
    parts = (program(), *command, str(Path(compiler[0]).resolve()), macros)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return command, f"native-{digest[:32]}.so"


def built_library() -> Path | None:
    """The library for this machine, if it has been built."""
    path = cache_folder() / _command_and_name(tuple(find_compiler()))[1]
    if not path.exists():
        return None
    _check_owner(path, stat.S_ISREG)
    return path


def build_library(check: Callable[[Path], None]) -> None:
    """Compile, `check` the result, and let it take its place. Raises NativeCodeError, OSError, and
    what `check` raises; nothing is left behind then."""
    folder = cache_folder()
    command, name = _command_and_name(tuple(find_compiler()))
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as work:
        made = Path(work) / name
        _run([*command, "-o", str(made)], program())
        made.chmod(0o700)
        check(made)
        made.replace(folder / name)
