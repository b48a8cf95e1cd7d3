# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a benchmark cannot use is refused before it works for minutes."""

import argparse

import _options
import pytest
import torch


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_not_positive(text):
    with pytest.raises(argparse.ArgumentTypeError, match="1 or more"):
        _options.positive(text)


@pytest.mark.parametrize("text", ["0", "-0.5", "nan", "inf", "much"])
def test_no_amount(text):
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        _options.amount(text)


def test_numbers():
    assert _options.positive("7") == 7
    assert _options.amount("0.5") == 0.5


def test_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _options.device("cpu") == "cpu"
    with pytest.raises(argparse.ArgumentTypeError, match="no GPU here"):
        _options.device("cuda")
    with pytest.raises(argparse.ArgumentTypeError, match="expected cpu or cuda"):
        _options.device("tpu")


def test_json_file(tmp_path):
    assert _options.json_file(str(tmp_path / "new" / "x.json")) == tmp_path / "new" / "x.json"
    (tmp_path / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=r"exists|Not a directory"):
        _options.json_file(str(tmp_path / "file" / "x.json"))
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        _options.json_file(str(tmp_path))
