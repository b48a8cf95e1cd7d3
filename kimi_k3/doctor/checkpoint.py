# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Looks at a model's folder: is it there, is it whole, in which format are its experts?

Reads config.json, the index and headers; never a weight, and never the network.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from k3_checkpoint.check import CheckpointError, check_checkpoint
from k3_checkpoint.formats import Format, declared_format
from k3_checkpoint.headers import Entry, HeaderError, read_header
from k3_checkpoint.spec import ExpertFormat, ModelSpec
from k3_checkpoint.tensors import Role, checkpoint_tensors
from kimi_k3.cli.units import size
from kimi_k3.convert.source import WORK_NAME
from kimi_k3.doctor.findings import Finding, Level
from kimi_k3.rehearsal.config import read_config
from kimi_k3.rehearsal.index import shards

AREA = "checkpoint"
ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight(_packed)?$")
_SHOWN = 5


class NoSuchModelError(ValueError):
    """Neither a folder nor the id of a model on the hub."""


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
    path = Path(name)
    if name and path.is_dir():
        return Model(path, name)
    if name and path.exists():
        raise NoSuchModelError(f"{name}: expected a checkpoint's folder, found a file")
    if not _HUB_ID.fullmatch(name):
        raise NoSuchModelError(
            f"{name!r}: expected a checkpoint's folder or a hub id such as moonshotai/Kimi-K3, "
            "found no such folder"
        )
    return Model(_cached(name), name)


def _cached(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json")
    return Path(found).parent if isinstance(found, str) else None


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
    try:
        config = read_config(model.folder)
    except FileNotFoundError:
        text = f"{model.folder} has none: it is no checkpoint, or not a complete one"
        return None, None, [Finding(AREA, "config.json", Level.PROBLEM, text)]
    except (OSError, ValueError, KeyError) as error:
        what = f"found no {error}" if isinstance(error, KeyError) else str(error)
        return None, None, [Finding(AREA, "config.json", Level.PROBLEM, what)]
    findings = list(_judge_config(config))
    named = declared_format(config)
    found, files = _look_at_shards(model.folder, named)
    whole = not any(finding.level is Level.PROBLEM for finding in files)
    if whole and found is not None:
        files += _check(model.folder, config, found)
    return config, found, findings + files


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


def _look_at_shards(folder: Path, named: Format) -> tuple[Format | None, list[Finding]]:
    try:
        files = shards(folder)
    except (OSError, ValueError) as error:
        return None, [Finding(AREA, "shards", Level.PROBLEM, str(error))]
    broken, total = [], 0
    formats: Counter[Format] = Counter()
    for file in files:
        try:
            entries = read_header(file)
            total += file.stat().st_size
        except (OSError, HeaderError) as error:
            broken.append(f"{file.name}: {error}")
            continue
        formats.update(
            _stored(entry) for name, entry in entries.items() if _EXPERT.search(name) is not None
        )
    if broken:
        more = f"; and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        text = f"{len(broken)} of {len(files)} are damaged: {'; '.join(broken[:_SHOWN])}{more}"
        return None, [Finding(AREA, "shards", Level.PROBLEM, text)]
    findings = [
        Finding(AREA, "shards", Level.OK, f"{len(files)} files, {size(total)}, headers are sound")
    ]
    stored, finding = _judge_formats(formats, named)
    return stored, [*findings, finding]


def _stored(entry: Entry) -> Format:
    return {"U8": Format.MXFP4, "I32": Format.INT4}.get(
        entry.dtype, Format.PLAIN if entry.dtype in ("BF16", "F16", "F32") else Format.OTHER
    )


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


def _check(folder: Path, config: dict[str, Any], stored: Format) -> Iterator[Finding]:
    """Hold every tensor to what config.json asks for."""
    subject = "tensors"
    try:
        spec = ModelSpec.from_config(config)
        check_checkpoint(folder, spec, experts=stored in (Format.MXFP4, Format.PLAIN))
        problems = list(int4_problems(folder, spec)) if stored is Format.INT4 else []
    except CheckpointError as error:
        problems = error.problems
    except ValueError as error:
        problems = [str(error)]
    except TypeError as error:
        problems = [f"config.json: a size of the wrong kind: {error}"]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        yield Finding(AREA, subject, Level.PROBLEM, "; ".join(problems[:_SHOWN]) + more)
    else:
        yield Finding(AREA, subject, Level.OK, "all are there, with the right shapes")


def int4_problems(folder: Path, spec: ModelSpec) -> Iterator[str]:
    """Yield what is wrong with the int4 experts of a model."""
    found: dict[str, Entry] = {}
    for file in shards(folder):
        found |= read_header(file)
    for tensor in checkpoint_tensors(replace(spec, expert_format=ExpertFormat.MXFP4)):
        if tensor.role is Role.CODES:
            rows, half = tensor.shape
            expected = Entry("I32", (rows, half // 4))
        elif tensor.role is Role.SCALES:
            expected = Entry("BF16", tensor.shape)
        else:
            continue
        entry = found.get(tensor.name)
        if entry is None:
            yield f"{tensor.name}: in no shard"
        elif entry != expected:
            yield (
                f"{tensor.name}: expected {expected.dtype} {list(expected.shape)}, found "
                f"{entry.dtype} {list(entry.shape)}"
            )
