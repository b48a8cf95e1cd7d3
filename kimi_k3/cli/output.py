# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What all commands share about what they print: a full disk, a closed pipe, vLLM's own log."""

import errno
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")]


def run(command_line: Callable[[], object]) -> None:
    """Run the command line; end in one line where its output cannot be written.

    A reader that has had enough (``| head``) is no error worth a word. Exit code 1 either way.
    """
    for stream in (sys.stdout, sys.stderr):
        # A name that is no text, or an ASCII terminal, is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            command_line()
        finally:
            # What is left in the buffer would fail when the interpreter ends, in a traceback.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        # An error of a file that was opened names it, and is the command's own to explain.
        if error.filename is not None or error.errno is None:
            raise
        _abandon_stdout()
        if error.errno != errno.EPIPE and sys.stderr is not None:
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def printable(text: str) -> str:
    """Return a text without what would steer a terminal: escapes in names of files and tensors."""
    return "".join(
        part if part.isprintable() or part == "\n" else part.encode("unicode_escape").decode()
        for part in text
    )


def finite(value: float | None) -> float | None:
    """Refuse an option's number that is none; click lets NaN through every range.

    Raises:
        BadParameter: It is NaN or infinite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a number, found {value}")
    return value


def fail(message: str, as_json: bool) -> NoReturn:
    """End a command that found something wrong with what it was to read: exit code 1.

    Raises:
        Exit: Always.
    """
    if as_json:
        print(json.dumps({"error": message}, indent=1))
    else:
        print(f"error: {printable(message)}", file=sys.stderr)
    raise typer.Exit(1)


def print_json(found: dict[str, Any]) -> None:
    """Print a command's result for other programs to read."""
    print(json.dumps(found, indent=2))


def _abandon_stdout() -> None:
    """Let whatever is still buffered go nowhere."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):
        sys.stdout = None


def check_writable(file: Path) -> None:
    """Refuse, before any work, a file that could not be written when it is done.

    Raises:
        ValueError: It is a folder, or lies in none, or may not be written.
    """
    if file.is_dir():
        raise ValueError(f"{file}: expected a file to write, found a folder")
    if not file.parent.is_dir():
        raise ValueError(f"{file}: expected a folder to write into, found no {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{file}: may not be written by this user")


def quiet_vllm() -> None:
    """Keep vLLM's log out of a command's output, unless the environment asks for it.

    To be called before vLLM is imported.
    """
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        # The platform is chosen, and complained about, before vLLM sets up its log.
        logging.getLogger("vllm").setLevel(logging.ERROR)
