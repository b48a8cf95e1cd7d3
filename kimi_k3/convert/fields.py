# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""JSON that somebody may have edited: each value is of its kind, or an error names the field."""

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from reprlib import repr as short
from typing import Any

from k3_checkpoint.headers import unique_pairs

_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_regular(file: Path) -> bytes:
    """A file's contents, links followed; a pipe or a device is not even opened.

    Raises:
        OSError: It cannot be read.
        ValueError: It is there, and no regular file.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("expected a regular file, found a folder, a pipe or a device")
    # One that has become a pipe since: nobody waits for its other end.
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as opened:
        return opened.read()


def read_json(file: Path) -> Any:
    """A small JSON file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON, or no regular file.
    """
    text = read_regular(file)
    try:
        return json.loads(text.decode(), object_pairs_hook=unique_pairs)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def objects(value: object, at: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """A JSON object, of exactly these fields if any are named.

    Raises:
        ValueError: It is none; the message begins with ``at``.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{at}: expected an object, found {short(value)}")
    if names is not None and value.keys() != set(names):
        missing, more = sorted(set(names) - value.keys()), sorted(value.keys() - set(names))
        found = [f"no {name}" for name in missing] + [f"an unknown {short(name)}" for name in more]
        raise ValueError(f"{at}: expected {', '.join(names)}, found {', '.join(found)}")
    return value


def text(value: object, at: str) -> str:
    """Text.

    Raises:
        ValueError: See `objects`.
    """
    if not isinstance(value, str):
        raise ValueError(f"{at}: expected text, found {short(value)}")
    return value


def texts(value: object, at: str) -> tuple[str, ...]:
    """A list of texts.

    Raises:
        ValueError: See `objects`.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{at}: expected a list of texts, found {short(value)}")
    return tuple(value)


def whole(value: object, at: str) -> int:
    """A whole number of 0 or more.

    Raises:
        ValueError: See `objects`.
    """
    # `type`, because JSON's true is an int to Python.
    if type(value) is not int or value < 0:
        raise ValueError(f"{at}: expected a whole number of 0 or more, found {short(value)}")
    return value


def checksum(value: object, at: str) -> str:
    """A SHA-256.

    Raises:
        ValueError: See `objects`.
    """
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{at}: expected a SHA-256, found {short(value)}")
    return value


def inside(name: str, at: str) -> str:
    """The name of a file in a folder, or in one below it.

    Raises:
        ValueError: It leads elsewhere, or nowhere.
    """
    path = PurePosixPath(name)
    if "\0" in name or str(path) != name or name == "." or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{at}: expected a name of a file in the folder, found {short(name)}")
    return name
