# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Looks at a model's folder: is it there, is it whole, in which format are its experts?

Reads config.json, the index and headers; never a weight, and never the network.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from k3_checkpoint import Checkpoint, Kind
from k3_checkpoint.check import find_problems
from k3_checkpoint.files import CONFIG_NAME, find_folder
from k3_checkpoint.files import NoSuchModelError as NoSuchModelError
from k3_checkpoint.formats import Format
from k3_checkpoint.spec import ModelSpec
from kimi_k3.convert.source import WORK_NAME
from kimi_k3.doctor.findings import Finding, Level
from kimi_k3.rehearsal.config import check_config
from kimi_k3.units import size

AREA = "checkpoint"
ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")
_SHOWN = 5


@dataclass(frozen=True)
class Model:
    """A model's folder.

    Attributes:
        folder: Where its files are; None for a hub id that is not in the local cache.
        name: What the user calls it.
    """

    folder: Path | None
    name: str


def locate(name: str) -> Model:
    """Find a model's folder: a path, or a hub id in the local cache. Fetches nothing.

    Raises:
        NoSuchModelError: The name can be neither.
    """
    return Model(find_folder(name), name)


def look(model: Model) -> tuple[dict[str, Any] | None, Format | None, list[Finding]]:
    """Look at a model's files.

    Returns:
        config.json, or None if it is of no use; the format of the experts in the shards, or None if
        they could not be read; what was found.
    """
    if model.folder is None:
        text = (
            "neither a folder nor in the local cache of the hub; `vllm serve` would fetch it. "
            f"Fetch it first: hf download {model.name}"
        )
        return None, None, [Finding(AREA, "files", Level.PROBLEM, text)]
    if (model.folder / WORK_NAME).is_dir():
        text = (
            f"the conversion into {model.folder} is not finished; the command that began it goes "
            f"on with --resume: kimi-k3 convert SRC {quote(str(model.folder))} --resume"
        )
        return None, None, [Finding(AREA, "files", Level.PROBLEM, text)]
    checkpoint = Checkpoint.open(model.folder)
    if (wrong := _config_problem(checkpoint)) is not None:
        return None, None, [Finding(AREA, CONFIG_NAME, Level.PROBLEM, wrong)]
    config = checkpoint.config
    findings = list(_judge_config(config))
    stored, files = _judge_shards(checkpoint)
    whole = not any(finding.level is Level.PROBLEM for finding in files)
    if whole and stored is not None:
        files.append(_judge_tensors(checkpoint, stored))
    return config, stored, findings + files


def _config_problem(checkpoint: Checkpoint) -> str | None:
    if not (checkpoint.folder / CONFIG_NAME).exists():
        return f"{checkpoint.folder} has none: it is no checkpoint, or not a complete one"
    try:
        for problem in checkpoint.of_kind(Kind.CONFIG):
            return problem.text
        check_config(checkpoint.config)
    except KeyError as error:
        return f"found no {error}"
    except ValueError as error:
        return str(error)
    return None


def _judge_config(config: dict[str, Any]) -> Iterator[Finding]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name in ARCHITECTURES:
        yield Finding(AREA, "architecture", Level.OK, str(name))
    else:
        yield Finding(
            AREA,
            "architecture",
            Level.PROBLEM,
            f"expected Kimi-K3 ({' or '.join(ARCHITECTURES)}), found {name!r}",
        )


def _judge_shards(checkpoint: Checkpoint) -> tuple[Format | None, list[Finding]]:
    if (missing := checkpoint.missing_shards()) is not None:
        return None, [Finding(AREA, "shards", Level.PROBLEM, missing)]
    for problem in checkpoint.of_kind(Kind.INDEX):
        return None, [Finding(AREA, "shards", Level.PROBLEM, str(problem))]
    count = len(checkpoint.shards)
    if broken := checkpoint.of_kind(Kind.SHARD):
        text = f"{len(broken)} of {count} are damaged: {_joined(broken)}"
        return None, [Finding(AREA, "shards", Level.PROBLEM, text)]
    text = f"{count} files, {size(checkpoint.nbytes)}, headers are sound"
    stored, finding = _judge_formats(checkpoint.stored(), checkpoint.declared)
    return stored, [Finding(AREA, "shards", Level.OK, text), finding]


def _joined(problems: Sequence[object]) -> str:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(map(str, problems[:_SHOWN])) + more


def _judge_formats(formats: Counter[Format], named: Format) -> tuple[Format | None, Finding]:
    subject = "experts"
    if not formats:
        return None, Finding(
            AREA, subject, Level.PROBLEM, "no shard holds a routed expert's weight"
        )
    if len(formats) > 1:
        if set(formats) == {Format.MXFP4, Format.INT4} and named is Format.MIXED:
            text = ", ".join(f"{count:,} matrices in {kind}" for kind, count in formats.items())
            return Format.MIXED, Finding(AREA, subject, Level.OK, text)
        text = ", ".join(f"{count:,} in {kind}" for kind, count in formats.items())
        return None, Finding(AREA, subject, Level.PROBLEM, f"of several formats: {text}")
    ((stored, count),) = formats.items()
    if stored is not named:
        text = f"config.json says {named}, the shards hold {stored}"
        return None, Finding(AREA, subject, Level.PROBLEM, text)
    return stored, Finding(AREA, subject, Level.OK, f"{stored}, {count:,} matrices")


def _judge_tensors(checkpoint: Checkpoint, stored: Format) -> Finding:
    """Hold every tensor to what config.json asks for."""
    judged = (Format.MXFP4, Format.PLAIN, Format.INT4)
    problems: Sequence[object]
    try:
        spec = ModelSpec.from_config(checkpoint.config)
        problems = find_problems(checkpoint, spec, stored if stored in judged else None)
    except ValueError as error:
        problems = [error]
    except TypeError as error:
        problems = [f"config.json: a size of the wrong kind: {error}"]
    if problems:
        return Finding(AREA, "tensors", Level.PROBLEM, _joined(problems))
    return Finding(AREA, "tensors", Level.OK, "all are there, with the right shapes")
