# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`require`: what it lets pass, and what each refusal says."""

import sys
from types import ModuleType

import pytest

from vllm_overlay import OverlayMismatchError, require

SOURCE = """
import functools

class Loader:
    limit = 3
    def load(self, weight, *, scale=None):
        return helper(weight)

def helper(weight):
    return weight

def anything(**kwargs):
    pass

@functools.wraps(helper)
def wrapped(*args):
    return other(*args)
"""


@pytest.fixture(autouse=True)
def module(monkeypatch):
    module = ModuleType("stand_in")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "stand_in", module)
    return module


def test_returns_the_object(module):
    assert require("stand_in:Loader.load") is module.Loader.load
    assert require("stand_in:Loader.limit") == 3


@pytest.mark.parametrize("parameters", [("self", "weight"), ("self", "weight", "scale")])
def test_accepts_a_signature_with_more_optional_parameters(parameters):
    require("stand_in:Loader.load", parameters=parameters)


def test_accepts_an_exact_signature():
    require("stand_in:Loader.load", parameters=("self", "weight", "scale"), exact=True)


def test_open_keywords_accept_any_name():
    require("stand_in:anything", parameters=("weight",))


def test_uses_looks_through_wrappers():
    require("stand_in:Loader.load", uses=("helper",))
    with pytest.raises(OverlayMismatchError, match="its code to refer to other"):
        require("stand_in:wrapped", uses=("other",))


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("gone.module:name", {}, "gone.module: name: expected an importable module"),
        ("stand_in:gone", {}, "stand_in: gone: expected the name to exist, found no 'gone'"),
        ("stand_in:Loader.gone", {}, "Loader.gone: expected the name to exist"),
        (
            "stand_in:Loader.load",
            {"parameters": ("self", "weight", "rank")},
            r"missing \['rank'\], also mandatory none",
        ),
        (
            "stand_in:Loader.load",
            {"parameters": ("self",)},
            r"missing none, also mandatory \['weight'\]",
        ),
        ("stand_in:Loader.limit", {"parameters": ("self",)}, "expected a callable"),
        ("stand_in:helper", {"uses": ("other",)}, "refer to other, found no such use"),
        (
            "stand_in:Loader.load",
            {"parameters": ("self", "weight"), "exact": True},
            r"expected exactly the parameters \(self, weight\), found \(self, weight, scale=None\)",
        ),
        (
            "stand_in:Loader.load",
            {"parameters": ("weight", "self", "scale"), "exact": True},
            "expected exactly the parameters",
        ),
    ],
)
def test_refusals(target, options, expected):
    with pytest.raises(OverlayMismatchError, match=expected) as error:
        require(target, **options)
    message = str(error.value)
    assert "cannot amend the installed vLLM" in message
    assert "Supported are vLLM 0.32.x and 0.33.x" in message
    assert "VLLM_KIMI_K3_OVERLAY=0" in message
    assert isinstance(error.value, ImportError)


def test_target_without_a_name():
    with pytest.raises(ValueError, match=r"expected 'package\.module:Qualified\.name'"):
        require("stand_in")
