# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Whole diagnoses, on this machine and on ones that are not here."""

from dataclasses import replace

import pytest

from k3_checkpoint.presets import PRESETS
from k3_checkpoint.spec import ExpertFormat
from k3_checkpoint.write import write_checkpoint
from kimi_k3.convert import ConvertOptions, convert_checkpoint
from kimi_k3.doctor import diagnose as module
from kimi_k3.doctor.diagnose import ServeOptions, diagnose
from kimi_k3.doctor.findings import Diagnosis, Level
from kimi_k3.doctor.machine import Aiter, Kind, Machine, Memory
from kimi_k3.rehearsal import memory_plan
from kimi_k3.rehearsal.ranks import Layout

GIB = 2**30
READY = Aiter("0.1.9", enabled=True, situ=True)


@pytest.fixture
def on(monkeypatch):
    """Diagnose as if on a machine."""

    monkeypatch.setattr(module, "has_command", lambda: True)

    def choose(machine: Machine | Exception) -> None:
        def look():
            if isinstance(machine, Exception):
                raise machine
            return machine

        monkeypatch.setattr(module.machines, "look", look)

    return choose


def gpus(architecture: str, count: int = 1, gib: int = 256, aiter: Aiter = READY) -> Machine:
    memory = tuple(Memory(f"GPU {n}", gib * GIB, (gib - 2) * GIB) for n in range(count))
    return Machine(Kind.ROCM, "RocmPlatform", architecture, memory, 64, aiter)


def host(free: int) -> Machine:
    return Machine(Kind.CPU, "CpuPlatform", memory=(Memory("RAM", 16 * GIB, free),), cores=4)


def problems(found: Diagnosis) -> dict[str, str]:
    texts: dict[str, str] = {}
    for row in found.of(Level.PROBLEM):
        texts[row.subject] = f"{texts.get(row.subject, '')}{row.text}\n"
    return texts


def test_cpu_with_memory_to_spare(on, mxfp4):
    on(host(15 * GIB))
    found = diagnose(str(mxfp4), ServeOptions(), {})
    assert found.ready
    assert found.command == f"vllm serve {mxfp4}"


def test_cpu_with_little_free_memory(on, int4):
    on(host(8 * GIB))
    found = diagnose(str(int4), ServeOptions(), {})
    assert found.verdict.startswith("ready, with 1 warning")
    assert found.command == f"vllm serve {int4} --gpu-memory-utilization 0.48"
    # With a fixed KV cache vLLM does not look at the share.
    found = diagnose(str(int4), ServeOptions(), {"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert found.verdict.startswith("ready: ")
    assert found.command == f"vllm serve {int4}"


def test_cpu_that_is_full(on, mxfp4):
    on(host(1 << 20))
    found = diagnose(str(mxfp4), ServeOptions(), {})
    assert "weights alone take" in problems(found)["RAM"]
    assert found.command is None


def test_sizes_that_do_not_divide(on, mxfp4):
    on(host(15 * GIB))
    found = problems(diagnose(str(mxfp4), ServeOptions(ranks=3), {}))
    assert "multiple of the tensor-parallel size 3" in found["sizes"]
    assert "not divisible by 3 ranks" in found["plan"]


def test_gfx942(on, mxfp4, int4):
    on(gpus("gfx942", 2))
    environ = {"VLLM_ROCM_USE_AITER": "1"}
    found = diagnose(str(mxfp4), ServeOptions(), environ)
    assert found.ready
    assert found.command == (
        f"vllm serve {mxfp4} --tensor-parallel-size 2 "
        "--quantization-config.moe.weight int4_per_group_32"
    )
    found = diagnose(str(int4), ServeOptions(ranks=1, load_format="safetensors"), environ)
    assert found.verdict.startswith("ready: ")
    assert found.command == f"vllm serve {int4} --load-format safetensors"
    found = problems(diagnose(str(mxfp4), ServeOptions(), {}))
    assert "VLLM_ROCM_USE_AITER=1" in found["VLLM_ROCM_USE_AITER"]


def test_a_checkpoint_converted_in_part(on, mxfp4, tmp_path):
    options = ConvertOptions(workers=1, exclude=("*.layers.2.*",))
    convert_checkpoint(mxfp4, tmp_path / "part", options)
    on(host(15 * GIB))
    found = diagnose(str(tmp_path / "part"), ServeOptions(), {})
    assert found.ready, found.verdict
    on(gpus("gfx942"))
    found = diagnose(str(tmp_path / "part"), ServeOptions(), {"VLLM_ROCM_USE_AITER": "1"})
    assert "convert all of them" in problems(found)["kernel"]


def test_a_checkpoint_that_is_not_quantized(on, tmp_path):
    spec = replace(PRESETS["tiny"], layers=2, vision=None, expert_format=ExpertFormat.BF16)
    write_checkpoint(tmp_path / "k3", spec, shards=1)
    on(host(15 * GIB))
    found = diagnose(str(tmp_path / "k3"), ServeOptions(), {})
    assert found.verdict.startswith("ready: "), found.verdict


@pytest.mark.parametrize(("gib", "fits"), [(192, False), (256, True), (288, True)])
def test_kimi_k3_itself(gib, fits):
    """Eight MI300X are too small for eight ranks; MI325X and MI355X are not."""
    need = memory_plan.plan(PRESETS["k3-shapes"].config(), Layout(8)).worker
    row = list(module.memory.judge(gpus("gfx950", 8, gib), need, 8, 0.92, None))[-1]
    assert (row.level is Level.OK) is fits


def test_without_a_package_named_vllm(on, mxfp4, monkeypatch):
    on(host(15 * GIB))
    monkeypatch.setattr(module, "has_command", lambda: False)
    found = diagnose(str(mxfp4), ServeOptions(), {})
    assert found.of(Level.WARNING)[0].subject == "command"
    assert found.command == f"python -m vllm.entrypoints.openai.api_server --model {mxfp4}"


def test_load_formats(on, mxfp4, monkeypatch):
    on(host(15 * GIB))
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    found = problems(diagnose(str(mxfp4), ServeOptions(load_format="fastsafetensors"), {}))
    assert "pip install fastsafetensors" in found["load format"]
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert diagnose(str(mxfp4), ServeOptions(load_format="fastsafetensors"), {}).ready
    found = diagnose(str(mxfp4), ServeOptions(load_format="gguf"), {})
    assert found.of(Level.WARNING)[0].subject == "load format"


def test_a_platform_that_cannot_be_found_out(on, mxfp4):
    on(RuntimeError("no driver"))
    found = diagnose(str(mxfp4), ServeOptions(), {})
    assert found.verdict == ("not ready: platform: could not be found out: RuntimeError: no driver")
    # The files are looked at all the same.
    assert any(row.subject == "tensors" and row.level is Level.OK for row in found.findings)


def test_refused_amendments_are_named(on, monkeypatch):
    from kimi_k3.doctor import amendments

    on(host(15 * GIB))
    refused = amendments.Amendment("vllm.x", "refused", "expected a name, found none")
    found = amendments.Status(
        {"vllm": "0.40.0"}, "p", "a", [refused], switched_off=False, tested=False
    )
    monkeypatch.setattr(amendments, "collect", lambda: found)
    made = diagnose(None, ServeOptions(), {})
    assert problems(made) == {"vllm.x": "refused: expected a name, found none\n"}
    assert made.of(Level.NOTE)[0].subject == "version"
