# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 report`, run as a user runs it."""

import json
import os

import pytest

from kimi_k3.cli.report import parse_layers, write_whole


def plain(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_tables_and_page(kimi_k3, int4, tmp_path):
    html = tmp_path / "report.html"
    process = kimi_k3("report", int4, "--html", html, "--worst", 2)
    assert process.returncode == 0, process.stderr
    for part in ("By layer", "error w1", "Codes", "Worst groups", "scale rule mse", "exact"):
        assert part in process.stdout
    assert process.stderr == f"page: {html}\n"
    assert html.read_text().startswith("<!doctype html>")


def test_a_page_needs_jinja2_and_says_so_before_the_work(kimi_k3, int4, tmp_path):
    (tmp_path / "jinja2.py").write_text("raise ModuleNotFoundError('jinja2')")
    html = tmp_path / "report.html"
    process = kimi_k3("report", int4, "--html", html, PYTHONPATH=str(tmp_path))
    assert (process.returncode, process.stdout) == (2, "")
    assert "pip install 'vllm-kimi-k3[report]'" in plain(process.stderr)
    assert not html.exists()


def test_json(kimi_k3, int4):
    process = kimi_k3("report", int4, "--json", "--layers", "2", "--sample", "0.5", "--worst", 0)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert {part["layer"] for part in found["layers"]} == {2}
    assert found["worst_groups"] == []
    assert 0 < found["total"]["relative_squared_error"] < 0.01
    assert found["share_of_rows"] == 0.5


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ("{int4}/nowhere",), "expected a checkpoint's folder, found none"),
        (1, ("{mxfp4}",), "its experts are MXFP4"),
        (2, ("{int4}", "--layers", "9-1"), "9-1 ends before it begins"),
        (1, ("{int4}", "--layers", "9"), "layers 9: no int4 matrix there"),
        (1, ("{int4}", "--sample", "0"), "expected more than 0"),
        (1, ("{int4}", "--source", "{int4}"), "not the shard that was converted"),
        (2, ("{int4}", "--html", "{int4}"), "expected a file to write, found a folder"),
        (2, ("{int4}", "--html", "{int4}/no/page.html"), "expected a folder to write into"),
    ],
)
def test_refusals(kimi_k3, int4, mxfp4, code, arguments, message):
    places = {"int4": int4, "mxfp4": mxfp4}
    process = kimi_k3("report", *(argument.format(**places) for argument in arguments))
    assert process.returncode == code
    assert message in plain(process.stderr)
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


def test_refusals_as_json(kimi_k3, mxfp4):
    process = kimi_k3("report", mxfp4, "--json")
    assert process.returncode == 1
    assert "its experts are MXFP4" in json.loads(process.stdout)["error"]
    assert process.stderr == ""


@pytest.mark.parametrize(
    ("text", "layers"), [("3", {3}), ("1,5-7", {1, 5, 6, 7}), (" 2 , 0-1 ", {0, 1, 2})]
)
def test_lists_of_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "1,,2", "1-2-3", "9999999", "²"])
def test_other_lists_are_refused(text):
    with pytest.raises(ValueError, match="layers"):
        parse_layers(text)


def test_a_text_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "page.html"
    write_whole(file, "first")
    with pytest.raises(TypeError):
        write_whole(file, None)
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
    umask = os.umask(0o022)
    os.umask(umask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask
