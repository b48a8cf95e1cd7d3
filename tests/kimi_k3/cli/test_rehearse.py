# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 rehearse` and `kimi-k3 plan`, run as a user runs them, and Kimi-K3's own figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GIB = 2**30
KIMI_K3 = Path(sys.executable).with_name("kimi-k3")


def kimi_k3(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(KIMI_K3), *map(str, arguments)],
        env={**os.environ, "COLUMNS": "160", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def record(*arguments: object) -> dict:
    process = kimi_k3("rehearse", *arguments, "--json")
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Six KDA layers with the row counts of Kimi-K3 and few columns: 6284 + 4 rows at TP8."""
    folder = tmp_path_factory.mktemp("rehearse") / "checkpoint"
    sizes = "--layers 6 --heads 96 --head-dim 128 --hidden-size 128 --stack kda --text-only"
    # An expert's slice as large as Kimi-K3's: stock vLLM cannot build a model with smaller ones.
    sizes += " --expert-intermediate-size 3072"
    process = kimi_k3("make-checkpoint", folder, *sizes.split())
    assert process.returncode == 0, process.stderr
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """Kimi-K3's own 497,220 headers."""
    folder = tmp_path_factory.mktemp("rehearse") / "k3"
    process = kimi_k3("make-checkpoint", folder, "--preset", "k3-shapes")
    assert process.returncode == 0, process.stderr
    return folder


@pytest.mark.parametrize("order", ["index", pytest.param("shuffled", marks=pytest.mark.slow)])
def test_stock_beside_overlay(small, order):
    ours = record(small, "--order", order)
    stock = record(small, "--order", order, "--without-overlay")
    assert (ours["overlay"], stock["overlay"]) == (True, False)
    assert ours["account"]["delays"] == []
    assert len(stock["account"]["delays"]) == 6
    for delay in stock["account"]["delays"]:
        (missing,) = delay["missing"]
        rows = [missing[key] // missing["row"] for key in ("arrived", "expected")]
        assert rows == [6284, 6288]
        # q, k, v, g, f_a and beta, whole, bf16.
        assert delay["nbytes"] == (4 * 12288 + 128 + 96) * 128 * 2
    assert ours["plan"] == stock["plan"]
    assert max(ours["account"]["history"], key=lambda point: point["seconds"])["device"] == 0


@pytest.mark.slow
def test_tables_and_plot(small, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "held.png"
    process = kimi_k3("rehearse", small, "--plot", plot, "--gpu", "64", "--world-hosts", 2)
    assert process.returncode == 0, process.stderr
    for text in ("routed experts", "KDA layers", "Load account of rank 0", "0 delayed", "64.0"):
        assert text in process.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_plan_on_a_gpu_that_is_too_small(small):
    process = kimi_k3("plan", small, "--gpu", "0.001")
    assert process.returncode == 1
    assert "does not fit" in process.stdout
    assert kimi_k3("plan", small, "--gpu", "MI325X").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "{}", "--tp", 5), "not divisible by 5 ranks"),
        (("plan", "{}", "--gpu", "MI1"), "expected one of MI300X"),
        (("plan", "{}/nowhere"), "No such file"),
        (("rehearse", "{}", "--order", "sideways"), "expected one of index, reverse, shuffled"),
        (("rehearse", "{}", "--world-hosts", 3), "8 ranks do not divide by 3 hosts"),
        (("rehearse", "{}", "--rank", 8), "rank 8 lies outside a layout of 8"),
        (("rehearse", "{}", "--tp", 7), "attention heads: 96 is not divisible by 7 ranks"),
        (("rehearse", "{}", "--plot", "{}"), "expected a file to write, found a folder"),
        (("rehearse", "{}", "--plot", "{}/no/a.png"), "found no"),
    ],
)
def test_refusals(small, arguments, message):
    process = kimi_k3(*(str(argument).format(small) for argument in arguments))
    assert process.returncode == 2
    assert message in " ".join(process.stderr.replace("│", " ").split())


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(small, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('matplotlib')")
    plot = ("--plot", tmp_path / "held.png")
    process = kimi_k3("rehearse", small, *plot, PYTHONPATH=str(tmp_path))
    assert process.returncode == 2
    assert "pip install 'vllm-kimi-k3[plot]'" in " ".join(process.stderr.replace("│", " ").split())


def test_what_vllm_refuses_is_told_without_its_dump(small):
    process = kimi_k3("rehearse", small, "--quantization", "nonsense")
    assert process.returncode == 2
    assert "unknown quantization name 'nonsense'" in process.stderr
    assert "pydantic" not in process.stderr


def test_small_models_are_planned_in_units_that_show_them(tmp_path):
    folder = tmp_path / "tiny"
    assert kimi_k3("make-checkpoint", folder).returncode == 0
    process = kimi_k3("plan", folder, "--tp", 1)
    assert "MiB" in process.stdout
    assert "0.00" not in process.stdout


@pytest.mark.slow
def test_kimi_k3_itself(full):
    """The figures that were measured on real runs; the rehearsal finds each by itself."""
    ours, stock = record(full), record(full, "--without-overlay")
    for run in (ours, stock):
        assert run["tensors"] == 497_052
        assert run["account"]["wrapped"] == 513
        merged = [
            held for layer, held in run["held_after"].items() if layer.endswith("in_proj_qkvgfab")
        ]
        assert len(merged) == 69
        if run is ours:
            assert merged == [0] * 69
        else:
            # One layer's six sources are 0.6592 GiB; other layers' may be held beside them.
            assert merged[63] / GIB == pytest.approx(42.1914, abs=1e-4)
            assert merged[68] / GIB == pytest.approx(45.4876, abs=1e-4)
    assert ours["account"]["completed_early"] == 513
    assert len(stock["account"]["delays"]) == 69
    assert ours["account"]["peak"]["nbytes"] / GIB == pytest.approx(0.9023, abs=1e-4)
    assert ours["account"]["peak"]["owner"] == "model.layers.0.mlp.gate_up_proj.weight"
    assert ours["plan"]["rounding"] / GIB == pytest.approx(56.13, abs=0.01)
    worker = (ours["plan"]["resident"] + ours["plan"]["absorbed"]) / GIB
    assert worker == pytest.approx(181.14, abs=0.01)
    assert ours["peak_rss"] < 1.5 * GIB
    # Half, not a third, so that a busy machine cannot fail the test.
    assert ours["cpu_seconds"] < stock["cpu_seconds"] / 2


@pytest.mark.slow
def test_kimi_k3_in_bf16(full):
    run = record(full, "--quantization", "bf16")
    expected = {
        "routed experts": 158.48,
        "routed experts' scales": 9.91,
        "KDA attention": 7.24,
        "latent projections": 4.95,
        "shared experts": 2.83,
        "MLA attention": 1.89,
        "router": 1.10,
        "embeddings": 0.27,
        "output head": 0.27,
        "dense MLP": 0.17,
    }
    for name, gib in expected.items():
        # The figures are given to 0.005 GiB; 0.5 % is the bar.
        tolerance = max(0.005 * gib, 0.005)
        assert run["plan"]["components"][name] / GIB == pytest.approx(gib, abs=tolerance)
    assert run["plan"]["resident"] / GIB == pytest.approx(187.13, abs=0.01)
    assert run["plan"]["vision"] > 0
