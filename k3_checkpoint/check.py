# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Is this folder a complete Kimi-K3 checkpoint? Told from its index and headers, before any load.

A load that lacks a tensor either fails late without naming the file or, with quantized experts,
does not fail at all and serves zeros. The check lists everything that is wrong at once. It reads
no tensor and changes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from k3_checkpoint.checkpoint import Checkpoint
from k3_checkpoint.formats import Format
from k3_checkpoint.headers import Entry
from k3_checkpoint.problems import Kind, Problem, listed
from k3_checkpoint.spec import ExpertFormat, ModelSpec
from k3_checkpoint.tensors import (
    Role,
    TensorSpec,
    checkpoint_tensors,
    expert_prefixes,
    expert_tensors,
)

_FLOATS = frozenset({"BF16", "F16", "F32"})
_SHOWN = 12
# A load minds neither files nor tensors that it does not ask for, nor what config.json is.
_FATAL = frozenset(Kind) - {Kind.CONFIG, Kind.UNNAMED, Kind.UNINDEXED}


class CheckpointError(ValueError):
    """A folder is no complete checkpoint of its model; the message lists what is wrong."""

    def __init__(self, folder: Path, problems: Sequence[Problem]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"{folder} is not a complete Kimi-K3 checkpoint, {count}:\n"
            + "\n".join(listed([str(problem) for problem in problems], _SHOWN))
            + "\nFetch or write the named files again."
        )
        self.problems = problems


def check_checkpoint(folder: Path, spec: ModelSpec, *, experts: bool = True) -> None:
    """Compare a folder's index and shard headers with what its model needs.

    Args:
        folder: holds safetensors shards and, for more than one, their index.
        spec: the model, from the folder's config.json.
        experts: also hold the routed experts to the format that ``spec`` names.

    Raises:
        CheckpointError: with every problem found.

    """
    problems = find_problems(
        Checkpoint.open(folder), spec, _FORMATS[spec.expert_format] if experts else None
    )
    if problems:
        raise CheckpointError(folder, problems)


_FORMATS = {ExpertFormat.MXFP4: Format.MXFP4, ExpertFormat.BF16: Format.PLAIN}


def find_problems(checkpoint: Checkpoint, spec: ModelSpec, experts: Format | None) -> list[Problem]:
    """Everything that keeps a checkpoint from being loaded as a model.

    Args:
        checkpoint: as it was opened.
        spec: the model.
        experts: the format to which routed experts are held: MXFP4, int4 or unquantized. None
            leaves them unjudged.

    """
    problems = [problem for problem in checkpoint.problems if problem.kind in _FATAL]
    # Nothing can be said about tensors while shards are missing or broken.
    if problems:
        return problems
    missing: list[Problem] = []
    for tensor in checkpoint_tensors(spec, experts=False):
        entry = checkpoint.entry(tensor.name)
        if entry is None:
            missing.append(Problem(Kind.TENSOR, tensor.name, "in no shard"))
        elif (text := _differs(tensor, entry, spec)) is not None:
            problems.append(Problem(Kind.TENSOR, tensor.name, text))
    if experts is not None:
        problems += _check_experts(checkpoint, spec, experts, missing)
    return problems + missing


def _check_experts(
    checkpoint: Checkpoint, spec: ModelSpec, stored: Format, missing: list[Problem]
) -> Iterator[Problem]:
    """Yield what is wrong with routed experts; adds what one lacks, in one line, to ``missing``."""
    kind = ExpertFormat.BF16 if stored is Format.PLAIN else ExpertFormat.MXFP4
    wanted = expert_tensors(replace(spec, expert_format=kind))
    if stored is Format.INT4:
        wanted = [_as_int4(tensor) for tensor in wanted]
    for prefix in expert_prefixes(spec):
        for expert in range(spec.experts):
            lacking = []
            for tensor in wanted:
                name = f"{prefix}{expert}.{tensor.name}"
                entry = checkpoint.entry(name)
                if entry is None:
                    lacking.append(tensor.name)
                elif (text := _differs(tensor, entry, spec)) is not None:
                    yield Problem(Kind.TENSOR, name, text)
            if lacking:
                text = f"{', '.join(lacking)} in no shard"
                missing.append(Problem(Kind.TENSOR, f"{prefix}{expert}", text))


def _as_int4(tensor: TensorSpec) -> TensorSpec:
    """Return a tensor of an MXFP4 expert as its int4 form has it: eight codes a word."""
    if tensor.role is Role.SCALES:
        return replace(tensor, dtype="BF16")
    return replace(tensor, dtype="I32", shape=(tensor.shape[0], tensor.shape[1] // 4))


def _differs(tensor: TensorSpec, entry: Entry, spec: ModelSpec) -> str | None:
    if entry.dtype == tensor.dtype and entry.shape == tensor.shape:
        return None
    if tensor.role is Role.A_LOG:
        # Stored flat with padding, or as (1, 1, H, 1); the heads come first in both.
        fits = prod(entry.shape) >= spec.heads and entry.dtype in _FLOATS
        return (
            None if fits else f"expected at least {spec.heads} floating-point values, found {entry}"
        )
    accepted, named = frozenset({tensor.dtype}), tensor.dtype
    if tensor.role is Role.SCALES and tensor.dtype == "U8":
        accepted = frozenset({"U8", "F8_E8M0"})
    elif tensor.dtype in _FLOATS and tensor.role is not Role.SCALES:
        accepted, named = _FLOATS, "BF16, F16 or F32"
    if entry.dtype in accepted and entry.shape == tensor.shape:
        return None
    return f"expected {named} {list(tensor.shape)}, found {entry}"
