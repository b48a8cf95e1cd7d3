# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Help fits the terminal and hides nothing; completion works in bash and zsh."""

import subprocess
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from kimi_k3.cli import app
from tests.kimi_k3.conftest import KIMI_K3

COMMANDS = sorted(command.name for command in app.registered_commands)


def test_every_command_is_there():
    assert COMMANDS == [
        "convert",
        "doctor",
        "make-checkpoint",
        "plan",
        "rehearse",
        "report",
        "status",
    ]


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"kimi-k3 {version('vllm-kimi-k3')}\n"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits(name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, [*([name] if name else []), "--help"], prog_name="kimi-k3")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    # Nothing is cut off, and no paragraph is broken where the source happens to break.
    assert "…" not in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name):
    command = typer.main.get_command(app).commands[name]
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        assert text, f"{name}: {parameter.name}"
        assert text.endswith((".", ")")), f"{name}: {parameter.name}: {text}"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_show_completion(kimi_k3, shell):
    # typer's own switch for tests: the shell is named instead of looked for.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    process = kimi_k3("--show-completion", shell, **named)
    assert process.returncode == 0, process.stderr
    assert f"_KIMI_K3_COMPLETE=complete_{shell}" in process.stdout


def test_bash_takes_the_completion():
    script = f'eval "$({KIMI_K3} --show-completion)"; complete -p kimi-k3'
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert process.stdout.rstrip().endswith("kimi-k3"), process.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kimi-k3 ", COMMANDS), ("kimi-k3 re", ["rehearse", "report"])],
)
def test_bash_completes(kimi_k3, typed, offered):
    words = typed.split(" ")
    process = kimi_k3(
        _KIMI_K3_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1)
    )
    assert process.stdout.split() == offered


def test_zsh_completes_options(kimi_k3):
    process = kimi_k3(_KIMI_K3_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="kimi-k3 report --w")
    assert "--worst" in process.stdout
