# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Proves a finished conversion against its manifest, its source and the library. Writes nothing."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.destination import Destination, digest_file
from kimi_k3.convert.fields import read_regular
from kimi_k3.convert.kept import judge, strangers, unlike
from kimi_k3.convert.kernel import check_device
from kimi_k3.convert.manifest import FileRecord, Manifest
from kimi_k3.convert.options import ConversionFailed, ConvertOptions, shown
from kimi_k3.convert.plan import Plan, make_plan
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.source import WORK_NAME


def verify_checkpoint(
    source: Path,
    destination: Path,
    options: ConvertOptions,
    progress: Progress | None = None,
) -> Manifest:
    """Prove a result.

    Every field of the manifest is compared with the source, every file's SHA-256 with the
    manifest's, those of the source's files too. Every module is converted again and compared byte
    for byte, and so is every tensor that was copied, config.json and the index. Files that no
    conversion wrote are named. One module of each shape in each shard goes through
    compressed-tensors' own decompression, where that is installed.

    Args:
        source: The source; where it lies does not matter.
        destination: A finished conversion.
        options: Workers and device; what was converted, and by which rule, the manifest says.
        progress: Who is told.

    Returns:
        The manifest.

    Raises:
        ConversionFailed: Names every file that is not what it should be.
    """
    from kimi_k3.convert.run import outcomes

    progress = progress or Progress()
    target = Destination(destination)
    manifest = target.manifest()
    chosen = replace(
        options,
        scale_rule=manifest.scale_rule,
        include=manifest.include,
        exclude=manifest.exclude,
    )
    plan = make_plan(source, chosen, target.folder)
    if not options.ray:
        check_device(options.device)
    problems = _check_plan(plan, manifest) + _check_files(plan, target, manifest)
    if Path(manifest.source).is_relative_to(target.folder):
        problems.append("source: the manifest names the destination itself as its source")
    elif manifest.source != str(plan.source.folder):
        progress.note(
            f"the manifest names {shown(manifest.source)} as its source; this proof is against "
            f"{shown(plan.source.folder)}"
        )
    names = [n for n in manifest.shards if n in plan.layouts]
    readable = []
    for name in names:
        path = target.folder / name
        record = manifest.shards[name]
        if path.is_file() and path.stat().st_size == record.result.bytes:
            readable.append(name)
        else:
            problem = judge(path, record.result, manifest.shards)
            problems.append(f"{shown(name)}: {problem}")
    size = sum(plan.source.headers[name].size for name in readable)
    progress.phase("verifying", size)
    jobs = [plan.job(name, target.folder / name, manifest.shards[name]) for name in readable]
    with closing(outcomes(jobs, options, size, progress)) as results:
        for done, outcome in enumerate(results, start=1):
            name, found = outcome.name, outcome.found
            if "error" in found:
                problems.append(found["error"])
            else:
                wrong = _explained(target.folder / name, manifest, found["problems"])
                problems += [f"{shown(name)}: {problem}" for problem in wrong]
            progress.shard(name, done, len(jobs))
    if problems:
        raise ConversionFailed(
            f"{shown(target.folder)} is not what its manifest and its source say, "
            + ("1 problem:" if len(problems) == 1 else f"{len(problems)} problems:"),
            problems,
            "Run again with --resume to write the named shards anew. If it is the source that "
            "changed, fetch it again, or convert it into a new folder.",
        )
    return manifest


def _explained(file: Path, manifest: Manifest, problems: list[str]) -> list[str]:
    """What is wrong with a shard; a swapped one is told as such."""
    if problems:
        swapped = judge(file, manifest.shards[file.name].result, manifest.shards)
        if swapped is not None and swapped.startswith("holds"):
            return [swapped]
    return problems


def _check_plan(plan: Plan, manifest: Manifest) -> list[str]:
    """Shards that only one side has, and what the manifest says otherwise than the headers."""
    problems = _only_one(manifest.shards, plan.layouts)
    for name in plan.layouts:
        if name in manifest.shards:
            wrong = unlike(plan, name, manifest.shards[name])
            problems += [f"{shown(name)}: {problem}" for problem in wrong]
    return problems


def _only_one(then: Iterable[str], now: Iterable[str]) -> list[str]:
    then, now = set(then), set(now)
    return [
        f"{shown(name)}: in the source, and not in the manifest"
        if name in now
        else f"{shown(name)}: in the manifest, and not in the source"
        for name in sorted(then ^ now)
    ]


def _check_files(plan: Plan, target: Destination, manifest: Manifest) -> list[str]:
    """Everything beside the shards."""
    config = plan.config_text()
    wanted = {name: digest_file(plan.source.folder / name) for name in plan.source.others}
    wanted["config.json"] = FileRecord(len(config), sha256(config).hexdigest())
    problems = _only_one(manifest.files, wanted)
    for name, record in wanted.items():
        if manifest.files.get(name, record) != record:
            problems.append(f"{shown(name)}: the manifest has another size or SHA-256 of it")
        problem = judge(target.folder / name, record, {})
        if problem is not None:
            problems.append(f"{shown(name)}: {problem}")
    try:
        if read_regular(target.folder / INDEX_NAME) != plan.index_text():
            problems.append(f"{INDEX_NAME}: not what the conversion of this source writes")
    except FileNotFoundError:
        problems.append(f"{INDEX_NAME}: not there")
    except ValueError as error:
        problems.append(f"{INDEX_NAME}: {error}")
    known = {*manifest.shards, *manifest.files, *plan.result_names}
    problems += [
        f"{shown(name)}: not of this conversion; remove it"
        for name in strangers(target.folder, known)
    ]
    if (target.folder / WORK_NAME).exists():
        problems.append(f"{WORK_NAME}: there, so a run is not finished")
    return problems
