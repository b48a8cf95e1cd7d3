# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Output that cannot be written ends a command in one line or in silence, not in a traceback."""

import os
import subprocess
from pathlib import Path

import pytest

from kimi_k3.cli.output import check_writable
from tests.kimi_k3.conftest import KIMI_K3


def run(stdout, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(KIMI_K3), *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("plan", "{}", "--tp", 1), ("plan", "{}", "--tp", 1, "--json"), ("report", "{}")],
    ids=["help", "table", "json", "refusal"],
)
def test_full_disk(mxfp4, arguments):
    with Path("/dev/full").open("w") as full:
        process = run(full, *(str(argument).format(mxfp4) for argument in arguments))
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert "Exception ignored" not in process.stderr
    if arguments[0] != "report":
        assert process.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "{}", "--tp", 1, "--json")], ids=str)
def test_closed_pipe(mxfp4, arguments):
    read, write = os.pipe()
    os.close(read)
    try:
        process = run(write, *(str(argument).format(mxfp4) for argument in arguments))
    finally:
        os.close(write)
    assert process.returncode == 1
    assert process.stderr == ""


def test_files_that_cannot_be_written(tmp_path):
    check_writable(tmp_path / "new")
    for file, message in (
        (tmp_path, "found a folder"),
        (tmp_path / "no" / "new", "found no"),
        (Path("/proc/version/x"), "found no"),
    ):
        with pytest.raises(ValueError, match=message):
            check_writable(file)
