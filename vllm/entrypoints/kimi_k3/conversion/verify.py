# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Proves a finished conversion against its manifest, its source and the library. Writes nothing."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from vllm.entrypoints.kimi_k3.checkpoint.shards import INDEX_NAME
from vllm.entrypoints.kimi_k3.conversion.destination import Destination
from vllm.entrypoints.kimi_k3.conversion.kept import judge
from vllm.entrypoints.kimi_k3.conversion.manifest import MANIFEST_NAME, Manifest
from vllm.entrypoints.kimi_k3.conversion.options import ConversionFailed, ConvertOptions, shown
from vllm.entrypoints.kimi_k3.conversion.plan import Plan, fingerprint, make_plan
from vllm.entrypoints.kimi_k3.conversion.progress import Progress
from vllm.entrypoints.kimi_k3.conversion.source import WORK_NAME


def verify_checkpoint(
    source: Path,
    destination: Path,
    options: ConvertOptions,
    progress: Progress | None = None,
) -> Manifest:
    """Prove a result.

    Every file's SHA-256 is compared with the manifest's, those of the source's shards too. Every
    module is converted again and compared byte for byte, and so is every tensor that was copied,
    config.json and the index. One module of each shape in each shard goes through
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
    from vllm.entrypoints.kimi_k3.conversion.run import outcomes

    progress = progress or Progress()
    target = Destination(destination)
    manifest = target.manifest()
    chosen = replace(
        options,
        scale_rule=manifest.scale_rule,
        include=manifest.include,
        exclude=manifest.exclude,
    )
    plan = make_plan(source, chosen)
    problems = _check_plan(plan, manifest) + _check_files(plan, target, manifest)
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
    """Shards that only one side has, and headers of the source that have changed."""
    then, now = fingerprint(manifest)["shards"], plan.fingerprint()["shards"]
    problems = []
    for name in sorted(then.keys() | now.keys()):
        if name not in then:
            problems.append(f"{shown(name)}: in the source, and not in the manifest")
        elif name not in now:
            problems.append(f"{shown(name)}: in the manifest, and not in the source")
        elif then[name] != now[name]:
            problems.append(f"{shown(name)}: the source's header is another one than then")
    return problems


def _check_files(plan: Plan, target: Destination, manifest: Manifest) -> list[str]:
    """Everything beside the shards."""
    problems = []
    for name, record in manifest.files.items():
        problem = judge(target.folder / name, record, {})
        if problem is not None:
            problems.append(f"{shown(name)}: {problem}")
    texts = {"config.json": plan.config_text(), INDEX_NAME: plan.index_text()}
    for name, text in texts.items():
        file = target.folder / name
        if not file.is_file():
            problems.append(f"{name}: not there")
        elif file.read_bytes() != text:
            problems.append(f"{name}: not what the conversion of this source writes")
    known = {*manifest.shards, *manifest.files, *texts, MANIFEST_NAME}
    problems += [
        f"{shown(file.name)}: not of this conversion"
        for file in target.folder.iterdir()
        if file.suffix == ".safetensors" and file.name not in known
    ]
    if (target.folder / WORK_NAME).exists():
        problems.append(f"{WORK_NAME}: there, so a run is not finished")
    return problems
