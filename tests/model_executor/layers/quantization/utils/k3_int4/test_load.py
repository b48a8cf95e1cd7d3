# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A layer's conversion: padding, damaged weights, and memory at Kimi-K3's size; and the report."""

import json
import os
import subprocess
import sys

import pytest
import torch

from mxfp4_int4 import (
    ConversionInputError,
    ConversionStats,
    convert_experts,
)
from tests.models.kimi_k3.support.simulated_gpu.int4_support import (
    INT4,
    NAME,
    build_layer,
    fill,
    make_config,
    rank_of,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_situ_int4_moe import expand_int4
from vllm.model_executor.layers.quantization.utils.k3_int4 import conversion_log, load, parameters
from vllm.model_executor.layers.quantization.utils.k3_int4.conversion_log import (
    ConversionLog,
    LayerRecord,
    log_of,
    peak_memory,
)


def test_padding_is_zero_whatever_was_in_memory():
    """A reload leaves garbage, NaN scales among it, where no checkpoint has values."""
    with rank_of(make_config(INT4), tp=2):
        layer = build_layer(hidden=128, inner=192)
        assert layer.intermediate_size_per_partition == 128
        fill(layer)
        for suffix in ("", "_scale"):
            w13 = getattr(layer, f"w13_weight{suffix}").data.unflatten(1, (2, 128))
            w13[:, :, 96:] = 255
            w2 = getattr(layer, f"w2_weight{suffix}").data
            w2[:, :, 96 * w2.shape[2] // 128 :] = 255
        layer.quant_method.process_weights_after_loading(layer)
    for expert in range(4):
        w13, w2 = (
            expand_int4(
                getattr(layer, f"{name}_weight")[expert],
                getattr(layer, f"{name}_weight_scale").view(4, -1)[expert],
                torch.float32,
            )
            for name in parameters.PROJECTIONS
        )
        assert not w13.view(2, 128, 128)[:, 96:].any()
        assert not w2[:, 96:].any()
        assert w13.view(2, 128, 128)[:, :96].any(dim=-1).all()


def test_damaged_weights_are_named():
    with rank_of(make_config(INT4)):
        layer = build_layer()
        fill(layer)
        layer.w2_weight_scale.data[2, 17, 3] = 255
        with pytest.raises(ConversionInputError, match=r"expert 2, row 17, group 3") as damaged:
            layer.quant_method.process_weights_after_loading(layer)
    assert f"{NAME}.w2_weight" in damaged.value.__notes__[0]


def test_expert_sample_walks_through_the_layers():
    """Neighbouring layers measure different experts, the same one at every load."""
    chosen = {sum(f"model.layers.{i}.experts".encode()) % 896 for i in range(10, 20)}
    assert len(chosen) == 10


def record(**changes) -> LayerRecord:
    fields = {"experts": 8, "seconds": 0.5, "source_bytes": 10**9, "peak_extra_bytes": 2**20}
    stats = ConversionStats(groups=10, exact_groups=6, zero_groups=2)
    return LayerRecord(**fields | {"stats": stats} | changes)


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(conversion_log.logger, "info", lambda form, line: said.append(line))
    return said


def test_one_line_at_the_end_of_each_load(lines):
    log = ConversionLog(object(), "mse", awaited=2)
    log.record("a", record())
    assert lines == []
    log.record("b", record(peak_extra_bytes=3 * 2**20))
    # Of ten groups two are zero; six minus two of the other eight are exact.
    (line,) = lines
    assert line == (
        "int4 experts, rank 0: 2 layers with 16 experts converted in 1.00 s (2.00 GB/s of MXFP4), "
        "scale rule mse; relative squared error 0.0000%, 50.0% of groups exact (one expert a layer "
        "measured, 16 groups); peak extra memory 3.0 MiB, new scales included"
    )


def test_a_partial_update_does_not_shift_the_next_line(lines):
    log = ConversionLog(object(), "mse", awaited=2)
    for name in "ab":
        log.record(name, record())
    assert len(lines) == 1
    log.record("a", record())
    assert len(lines) == 1
    for name in "ab":
        log.record(name, record())
    assert len(lines) == 2


def test_a_draft_model_has_its_own_line(lines):
    """MTP layers are built and loaded after the target, under the same configuration."""
    log = ConversionLog(object(), "mse", awaited=2)
    for name in "ab":
        log.record(name, record())
    log.awaited += 1
    log.record("mtp", record())
    assert ["2 layers" in line for line in lines] == [True, False]
    assert "1 layers with 8 experts" in lines[1]
    # Then the target alone is updated.
    for name in "ba":
        log.record(name, record())
    assert len(lines) == 3
    assert "2 layers" in lines[2]


def test_layers_of_one_model_share_a_report():
    first, second = object(), object()
    report = log_of(first, "mse")
    assert log_of(first, "mse") is report
    assert log_of(second, "mse") is not report


def test_peak_memory_sees_what_is_held_and_given_back():
    noted = LayerRecord()
    with peak_memory(torch.device("cpu"), noted):
        torch.ones(64 << 20, dtype=torch.uint8).clone()
    # Pages of an allocator's earlier garbage may be reused; other threads may add some.
    assert 64 << 20 <= noted.peak_extra_bytes <= 192 << 20


@pytest.mark.parametrize("folder", [None, "", "somewhere"])
def test_errors_and_memory_are_measured_only_when_asked_for(monkeypatch, lines, folder):
    """A sample costs a second conversion; the peak's counter belongs to the whole process."""
    monkeypatch.delenv(conversion_log.MEASURE_VARIABLE, raising=False)
    if folder is not None:
        monkeypatch.setenv(conversion_log.MEASURE_VARIABLE, folder)
    calls = []

    def convert(*args, **kwargs):
        calls.append(kwargs.get("collect_stats", False))
        return convert_experts(*args, **kwargs)

    monkeypatch.setattr(load, "convert_experts", convert)
    with rank_of(make_config(INT4)):
        layer = build_layer()
        fill(layer)
        layer.quant_method.process_weights_after_loading(layer)
    (line,) = lines
    assert line.startswith("int4 experts, rank 0: 1 layers with 4 experts converted in ")
    assert calls == ([True, False] * 2 if folder else [False] * 2)
    assert ("one expert a layer measured" in line) == bool(folder)
    assert ("peak extra memory" in line) == bool(folder)


LAYER_OF_KIMI_K3 = """
import json, sys
import torch
import vllm_overlay

vllm_overlay.activate()
from types import SimpleNamespace
from vllm.model_executor.layers.quantization.utils.k3_int4 import load

EXPERTS = 896
layer = torch.nn.Module()
layer.layer_name = "model.layers.1.block_sparse_moe.experts"
for name, rows, width in (("w13", 768, 3584), ("w2", 3584, 384)):
    weight = torch.empty(EXPERTS, rows, width // 2, dtype=torch.uint8)
    scale = torch.empty(EXPERTS, rows, width // 32, dtype=torch.uint8)
    for expert in range(EXPERTS):
        weight[expert].random_(0, 256)
        scale[expert].random_(110, 126)
    for suffix, tensor in (("", weight), ("_scale", scale)):
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        setattr(layer, f"{name}_weight{suffix}", parameter)
    del weight, scale, tensor, parameter
moe = SimpleNamespace(intermediate_size_per_partition_unpadded=384)
record = load.convert_layer(layer, moe, "mse", torch.uint8)
new = layer.w13_weight_scale.nbytes + layer.w2_weight_scale.nbytes
print(json.dumps({"extra": record.peak_extra_bytes, "scales": new, "seconds": record.seconds}))
"""


@pytest.mark.slow
def test_memory_of_a_layer_of_kimi_k3():
    """896 experts at TP8, 1.83 GiB: beyond them, the new scales and one chunk of eight experts."""
    ended = subprocess.run(
        [sys.executable, "-c", LAYER_OF_KIMI_K3],
        env={**os.environ, conversion_log.MEASURE_VARIABLE: "measured"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    measured = json.loads(ended.stdout.splitlines()[-1])
    chunk = 8 * 768 * (3584 // 2 + 3584 // 32)
    assert 0 < measured["extra"] <= measured["scales"] + chunk


def test_peak_memory_without_linux(monkeypatch, tmp_path):
    """Where the kernel does not tell, nothing is claimed."""
    monkeypatch.setattr(conversion_log, "Path", lambda name: tmp_path / "none" / name[1:])
    noted = LayerRecord()
    with peak_memory(torch.device("cpu"), noted):
        pass
    assert noted.peak_extra_bytes is None
    line = ConversionLog(object(), "mse").summary([record(peak_extra_bytes=None)])
    assert "peak extra memory" not in line
