# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Environment variables that decide which way Kimi-K3 takes through vLLM, and what each does here.

Reads the values that it is given and imports neither torch nor vLLM.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kimi_k3.doctor.findings import Finding, Level
from kimi_k3.doctor.machine import Kind, Machine, writable

AREA = "environment"
PLUGIN = "kimi_k3"
Judged = tuple[Level, str]
OVERLAY_OFF = (
    "the overlay stays out and vLLM runs as it is: KDA layers on ROCm hold their sources while "
    "they load, int4 experts are not checked, and a CPU cannot serve Kimi-K3"
)


def judge(environ: Mapping[str, str], machine: Machine, ranks: int) -> Iterator[Finding]:
    """Say of each variable that is set what it does, and of missing ones that are needed.

    Args:
        environ: The environment.
        machine: Where vLLM will run.
        ranks: Tensor-parallel ranks.
    """
    judges = _judges(environ, machine, ranks)
    for name, judged in judges.items():
        if name in environ:
            level, text = judged(environ[name])
            yield Finding(AREA, name, level, f"{environ[name]!r}: {text}")
    if machine.kind is Kind.ROCM and "VLLM_ROCM_USE_AITER" not in environ:
        yield Finding(
            AREA,
            "VLLM_ROCM_USE_AITER",
            Level.PROBLEM,
            "not set, and vLLM's default is 0: AITER, the only kernels for Kimi-K3's experts, "
            "stays out. Set VLLM_ROCM_USE_AITER=1",
        )
    if not any(name in environ for name in judges):
        yield Finding(AREA, "variables", Level.OK, "none is set that changes the way")


def _judges(
    environ: Mapping[str, str], machine: Machine, ranks: int
) -> dict[str, Callable[[str], Judged]]:
    on_cpu, on_rocm = machine.kind is Kind.CPU, machine.kind is Kind.ROCM

    def only(here: bool, judged: Callable[[str], Judged]) -> Callable[[str], Judged]:
        return judged if here else lambda value: (Level.NOTE, f"no effect on {machine.kind}")

    def aiter(what: str, level: Level = Level.PROBLEM) -> Callable[[str], Judged]:
        return only(on_rocm, lambda value: _aiter_switch(value, what, level))

    visible = {
        name: lambda value: _visible(value, machine, ranks)
        for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    }
    moe = "AITER's fused MoE, the only kernel for Kimi-K3's experts"
    return {
        "VLLM_KIMI_K3_OVERLAY": lambda value: _overlay(value, machine),
        "VLLM_PLUGINS": lambda value: _plugins(value, machine),
        "VLLM_TARGET_DEVICE": lambda value: _target(value, machine),
        "VLLM_ROCM_USE_AITER": aiter("AITER, the only kernels for Kimi-K3's experts"),
        "VLLM_ROCM_USE_AITER_MOE": aiter(moe),
        "VLLM_ROCM_USE_AITER_MLA": aiter("AITER's MLA attention", Level.NOTE),
        "VLLM_ROCM_USE_AITER_LINEAR": aiter("AITER's linear layers", Level.NOTE),
        "VLLM_ROCM_USE_AITER_RMSNORM": aiter("AITER's RMSNorm", Level.NOTE),
        "VLLM_ROCM_USE_AITER_MOE_SITUV2": only(on_rocm, _situv2),
        "VLLM_MLA_DISABLE": _mla,
        "VLLM_KIMI_K3_INT4_SCALE_RULE": _scale_rule,
        "VLLM_KIMI_K3_NATIVE": _native,
        "VLLM_KIMI_K3_LOAD_BUDGET_GIB": _budget,
        "VLLM_KIMI_K3_LOAD_ACCOUNT": _account,
        "VLLM_CPU_KVCACHE_SPACE": only(on_cpu, lambda value: _cache_space(value, machine)),
        "VLLM_CPU_OMP_THREADS_BIND": only(on_cpu, lambda value: _binding(value, machine, ranks)),
        "OMP_NUM_THREADS": only(on_cpu, _threads),
        "CPU_VISIBLE_MEMORY_NODES": only(
            on_cpu, lambda value: (Level.NOTE, "memory and cores of these NUMA nodes alone")
        ),
        **visible,
        "HF_HUB_OFFLINE": _offline,
        "TRANSFORMERS_OFFLINE": _offline,
        "VLLM_USE_MODELSCOPE": lambda value: (
            (Level.WARNING, "models are fetched from ModelScope; only Hugging Face's cache is seen")
            if _on(value)
            else (Level.OK, "models come from Hugging Face")
        ),
    }


def _on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def _whole(value: str) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


def _overlay(value: str, machine: Machine) -> Judged:
    if value in ("", "1"):
        return Level.OK, "the overlay is on, as it is by default"
    if value == "0":
        return (Level.PROBLEM if machine.kind is Kind.CPU else Level.WARNING), OVERLAY_OFF
    return Level.PROBLEM, "expected 0 or 1; the overlay refuses to start. Unset it"


def _plugins(value: str, machine: Machine) -> Judged:
    if PLUGIN in value.split(","):
        return Level.OK, "the overlay is among the plugins that vLLM loads"
    level = Level.PROBLEM if machine.kind is Kind.CPU else Level.WARNING
    return level, f"{OVERLAY_OFF}. Add {PLUGIN} to the list, or unset it"


def _target(value: str, machine: Machine) -> Judged:
    if value.lower() != "cpu":
        return Level.NOTE, "read when vLLM is built; no effect while it runs"
    text = "vLLM takes the CPU platform whatever GPUs there are, and skips platform plugins; the "
    text += "overlay starts with the general ones"
    return Level.NOTE, text


def _aiter_switch(value: str, what: str, off: Level) -> Judged:
    if value.lower() in ("true", "1"):
        return Level.OK, f"{what}: on"
    return off, f"{what}: off" + (". Set it to 1" if off is Level.PROBLEM else "")


def _situv2(value: str) -> Judged:
    allowed = ("auto", "a4w4", "a8w4", "a16w4")
    if value.lower() not in allowed:
        return Level.PROBLEM, f"expected one of {', '.join(allowed)}; vLLM will not start"
    return Level.NOTE, "the activation dtype of SiTU experts in MXFP4; int4 experts take bfloat16"


def _mla(value: str) -> Judged:
    if value.strip() in ("", "0"):
        return Level.OK, "MLA layers are computed as MLA"
    return Level.PROBLEM, "Kimi-K3's MLA layers have no other form. Unset it"


def _scale_rule(value: str) -> Judged:
    if value == "mse":
        return Level.OK, "int4 scales with the smaller squared error, as by default"
    if value == "absmax":
        return Level.WARNING, "int4 scales by AITER's own rule, for comparison: twice the error"
    return Level.PROBLEM, "expected mse or absmax; int4 experts are refused. Unset it"


def _native(value: str) -> Judged:
    if value == "0":
        return Level.NOTE, "a CPU converts to int4 by torch alone, which takes longer"
    if value == "1":
        return Level.NOTE, "a CPU converts to int4 by compiled code, or stops with an error"
    if not value:
        return Level.OK, "compiled code where there is a C compiler and it pays"
    return Level.PROBLEM, "expected 0 or 1. Unset it"


def _budget(value: str) -> Judged:
    if not value:
        return Level.OK, "the default limit for buffered sources"
    try:
        gib = float(value)
    except ValueError:
        gib = -1
    if not 0 <= gib < float("inf"):
        return Level.PROBLEM, "expected a number of GiB, 0 for no limit; the load stops at once"
    if gib == 0:
        return Level.NOTE, "no limit for buffered sources; a load may die in the allocator"
    return Level.OK, f"a load stops when a rank buffers more than {gib:g} GiB of sources"


def _account(value: str) -> Judged:
    if not value:
        return Level.OK, "no records of loads are kept"
    if not writable(Path(value)):
        return Level.WARNING, "records of loads go there, and it cannot be written"
    return Level.OK, "records of loads go there"


def _cache_space(value: str, machine: Machine) -> Judged:
    gib = _whole(value) if value else 0
    if gib is None or gib < 0:
        return Level.PROBLEM, "expected a whole number of GiB; vLLM will not start"
    if not value:
        return Level.OK, "the KV cache takes what --gpu-memory-utilization leaves"
    free = machine.memory[0].free if machine.memory else 0
    if machine.memory and gib * 2**30 > free:
        return Level.PROBLEM, f"the KV cache takes {gib} GiB, more than is free"
    return (
        Level.OK,
        f"the KV cache takes {gib} GiB, whatever --gpu-memory-utilization says",
    )


def _binding(value: str, machine: Machine, ranks: int) -> Judged:
    if value == "auto":
        return Level.OK, "vLLM chooses the cores of each rank: one NUMA node a rank"
    if value == "nobind":
        return Level.OK, "threads are not bound to cores"
    parts = value.split("|")
    if len(parts) != ranks:
        text = f"cores for {len(parts)} ranks, and {ranks} will start: expected {ranks} lists of "
        return Level.PROBLEM, f"{text}cores with | between them"
    return Level.OK, "cores of each rank"


def _threads(value: str) -> Judged:
    count = _whole(value)
    if count is None or count < 1:
        return Level.WARNING, "expected a number of threads"
    return Level.NOTE, f"{count} OpenMP thread{'s' if count != 1 else ''} a process"


def _visible(value: str, machine: Machine, ranks: int) -> Judged:
    if machine.kind is Kind.CPU:
        return Level.NOTE, "no effect on CPU"
    if not value.strip() or value.strip() == "-1":
        return Level.PROBLEM, "hides every GPU. Unset it"
    if machine.gpus < ranks:
        return Level.WARNING, f"shows {machine.gpus} GPUs, and {ranks} ranks are asked for"
    return Level.OK, f"shows {machine.gpus} GPUs"


def _offline(value: str) -> Judged:
    if _on(value):
        return Level.OK, "nothing is fetched: a hub id has to be in the local cache"
    return Level.OK, "a hub id that is not in the local cache is fetched"
