# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The verdict follows from the findings, and a probe that breaks is a finding."""

import json

import pytest

from kimi_k3.doctor.findings import Diagnosis, Finding, Level, probed


def rows(*levels: Level) -> tuple[Finding, ...]:
    return tuple(Finding("a", f"s{n}", level, f"text {n}") for n, level in enumerate(levels))


@pytest.mark.parametrize(
    ("levels", "ready", "verdict"),
    [
        ((), True, "ready: k3 can be served here"),
        ((Level.OK, Level.NOTE), True, "ready: k3 can be served here"),
        ((Level.WARNING,), True, "ready, with 1 warning: k3 can be served here"),
        ((Level.WARNING, Level.WARNING), True, "ready, with 2 warnings: k3 can be served here"),
        ((Level.WARNING, Level.PROBLEM), False, "not ready: s1: text 1"),
        ((Level.PROBLEM, Level.PROBLEM), False, "not ready: s0: text 0 (and 1 more)"),
    ],
)
def test_verdict(levels, ready, verdict):
    found = Diagnosis("k3", rows(*levels))
    assert (found.ready, found.verdict) == (ready, verdict)
    assert json.loads(json.dumps(found.as_dict()))["verdict"] == verdict


def test_verdict_is_one_line():
    found = Diagnosis(None, (Finding("a", "s", Level.PROBLEM, "first\nsecond"),))
    assert found.verdict == "not ready: s: first"
    assert Diagnosis(None, ()).verdict == "ready: this machine can serve Kimi-K3"


def test_a_probe_that_breaks_is_a_finding():
    def breaks():
        yield Finding("a", "s", Level.OK, "fine so far")
        raise RuntimeError("no\n  driver")

    (found,) = probed("machine", "GPU", breaks)
    assert (found.area, found.subject, found.level) == ("machine", "GPU", Level.PROBLEM)
    assert found.text == "could not be found out: RuntimeError: no driver"


def test_a_probe_that_exits_is_a_finding():
    def leaves():
        raise SystemExit(3)

    (found,) = probed("machine", "AITER", leaves)
    assert "SystemExit: 3" in found.text
