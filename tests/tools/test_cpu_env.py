# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The environment recipe: where torch is looked for, when nothing is to be done, what it refuses.

That it builds a working environment is shown by every run of these tests in one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import cpu_env


def test_local_wheel_is_preferred(tmp_path):
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    for link in (str(tmp_path), f"file://{tmp_path}"):
        assert cpu_env.torch_sources([link]) == ["--find-links", link]


def test_without_a_local_wheel_the_cpu_index_is_asked(tmp_path):
    (tmp_path / "torch-2.9.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    for links in ([], [str(tmp_path)], ["https://wheels.example/simple"]):
        options = cpu_env.torch_sources(links)
        assert options[-4:] == [
            "--index",
            "https://download.pytorch.org/whl/cpu",
            "--index-strategy",
            "unsafe-best-match",
        ]


def test_links_are_read_from_pip(tmp_path, monkeypatch):
    configuration = tmp_path / "pip.conf"
    configuration.write_text("[global]\nfind-links =\n    /first\n    /second\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_FIND_LINKS", "/third")
    links = cpu_env.configured_links(Path(sys.executable))
    assert {"/first", "/second", "/third"} <= set(links)


def test_up_to_date_environment_is_left_alone(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("nothing should be installed")

    monkeypatch.setattr(cpu_env.subprocess, "run", fail)
    (tmp_path / cpu_env.STAMP).write_text(cpu_env.inputs_digest(["test"]))
    cpu_env.build(tmp_path, ["test"])
    assert "up to date" in capsys.readouterr().out


def test_failed_step_leaves_no_stamp(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / cpu_env.STAMP).write_text("older inputs")

    def fail(command, **kwargs):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(cpu_env.subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        cpu_env.build(tmp_path, [])
    assert not (tmp_path / cpu_env.STAMP).exists()


def test_old_python_and_other_systems_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_env.sys, "version_info", (3, 10, 4))
    with pytest.raises(SystemExit, match=r"expected Python 3\.11 or newer"):
        cpu_env.build(tmp_path, [])
    monkeypatch.undo()
    monkeypatch.setattr(cpu_env.platform, "system", lambda: "Darwin")
    with pytest.raises(SystemExit, match="wheels for Linux, found Darwin"):
        cpu_env.build(tmp_path, [])
