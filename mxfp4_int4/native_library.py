# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""native.c as this installation has it: an extension that setup.py builds where there is a C
compiler. A plain shared library, of any Python's version, called through ctypes. Without torch."""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from .errors import ConversionInputError, NativeCodeError

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_KIMI_K3_NATIVE"
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int


@dataclass(frozen=True)
class Library:
    """The loaded code. Its functions release the GIL; native.c says what they take.

    level: which of its versions the CPU can run, the highest being the fastest; 1 for the baseline.
    """

    code: ctypes.CDLL
    level: int


def switch() -> bool | None:
    """What the environment says: True (have it or fail), False (leave it), None (where it is)."""
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConversionInputError(
            f"{VARIABLE}: expected 0 (never), 1 (always, or fail) or nothing, received {text!r}"
        )
    return bool(int(text)) if text else None


def library() -> Library | None:
    """The compiled code; None where there is none, or the environment switches it off. Raises
    NativeCodeError where the environment insists on it."""
    wanted = switch()
    if wanted is False:
        return None
    found = _load()
    if isinstance(found, Library):
        return found
    if wanted:
        raise NativeCodeError(
            f"{VARIABLE} is 1, and there is no compiled code: {found}. Install vllm-kimi-k3 anew "
            "where there is a C compiler, or leave the variable unset: torch gives the same bits"
        )
    return None


@cache
def _load() -> Library | str:
    """The library, or why there is none."""
    found = _open()
    if isinstance(found, str):
        logger.info(
            "MXFP4 is converted on the CPU by torch, at about a tenth of the speed, for want of "
            "compiled code: %s",
            found,
        )
    return found


def _open() -> Library | str:
    spec = find_spec(f"{__package__}._native")
    if spec is None or spec.origin is None:
        return "this installation was made without a C compiler"
    try:
        code = ctypes.CDLL(spec.origin)
        code.convert.argtypes = [_POINTER] * 4 + [_SIZE] * 5 + [_INT] * 2 + [_POINTER, _INT]
        code.convert.restype = None
        code.largest.argtypes = [_POINTER, _SIZE]
        code.largest.restype = ctypes.c_uint8
        level = code.cpu_level()
    except (OSError, AttributeError) as error:
        return f"{spec.origin}: {error}"
    return Library(code, level) if level else "this CPU has no SSE4.2"
