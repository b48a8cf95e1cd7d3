# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A checkpoint as its config.json, index and headers describe it, and everything wrong with it.

Reads no tensor, changes nothing, and imports neither torch nor vLLM.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from k3_checkpoint.files import CONFIG_NAME, NoSuchModelError, find_folder, read_config, read_index
from k3_checkpoint.formats import PACKED, Format, declared_format, stored_format
from k3_checkpoint.headers import Entry, Header, HeaderError, read_full_header
from k3_checkpoint.problems import Kind, Problem, shown
from k3_checkpoint.shards import INDEX_NAME

_NUMBERED = re.compile(r"(.*-)(\d+)(-of-(\d+)\.safetensors)")
_EXPERT_WEIGHT = re.compile(r"\.experts\.\d+\.w[123]\.weight(_packed)?$")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, read once.

    Attributes:
        folder: Where it is.
        config: Contents of config.json; empty if it is of no use.
        indexed: Whether there is an index.
        metadata: What the index says beside its map.
        shards: Names of all shards that there should be, in the order in which vLLM reads them.
        headers: Shard -> header, of those that could be read.
        owner: Tensor -> the shard that holds it. It is the index's map unless `problems` says
            otherwise.
        problems: Everything that is wrong; whether it matters, callers decide by its kind.
    """

    folder: Path
    config: dict[str, Any]
    indexed: bool
    metadata: dict[str, Any]
    shards: tuple[str, ...]
    headers: dict[str, Header]
    owner: dict[str, str]
    problems: tuple[Problem, ...]

    @classmethod
    def open(cls, place: Path | str) -> Self:
        """Read a folder, or a model in the local hub cache.

        Never raises for what is wrong with a checkpoint: that is in `problems`.

        Args:
            place: The folder, or as text also a hub id such as ``moonshotai/Kimi-K3``.
        """
        try:
            folder = place if isinstance(place, Path) else find_folder(place)
            why = "not in the local cache of the hub"
        except NoSuchModelError as error:
            folder, why = None, str(error)
        if folder is None or not folder.is_dir():
            why = why if folder is None else "expected a checkpoint's folder, found none"
            problem = Problem(Kind.FOLDER, "", why)
            return cls(Path(place), {}, False, {}, (), {}, {}, (problem,))
        problems: list[Problem] = []
        config = _open_config(folder, problems)
        located, metadata, shards = _find_shards(folder, problems)
        headers = _read_headers(folder, shards, Counter(located.values()), problems)
        owner = _find_owners(headers, problems)
        if located:
            problems += _compare(located, owner, headers)
        indexed = (folder / INDEX_NAME).exists()
        return cls(folder, config, indexed, metadata, shards, headers, owner, tuple(problems))

    def of_kind(self, *kinds: Kind) -> list[Problem]:
        """Return the problems of some kinds."""
        return [problem for problem in self.problems if problem.kind in kinds]

    @property
    def files(self) -> list[Path]:
        """Paths of all shards, in the order in which vLLM reads them."""
        return [self.folder / name for name in self.shards]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards that could be read."""
        return sum(header.size for header in self.headers.values())

    @property
    def declared(self) -> Format:
        """The format of routed experts that config.json names."""
        return declared_format(self.config)

    def stored(self) -> Counter[Format]:
        """Count the routed experts' matrices by the format in which the shards hold them."""
        return Counter(
            stored_format(entry.dtype)
            for header in self.headers.values()
            for name, entry in header.entries.items()
            if ".experts." in name and _EXPERT_WEIGHT.search(name)
        )

    def entry(self, tensor: str) -> Entry | None:
        """Return dtype and shape of a tensor; None if no shard holds it."""
        shard = self.owner.get(tensor)
        return None if shard is None else self.headers[shard].entries[tensor]

    def span(self, tensor: str) -> tuple[int, int]:
        """Return where a tensor's bytes are in its shard: the first, and the one after the last."""
        return self.headers[self.owner[tensor]].spans[tensor]

    def packed_modules(self) -> Iterator[str]:
        """Yield the names of the modules whose weights are packed, as in MXFP4 and int4."""
        for tensor in self.owner:
            module, _, leaf = tensor.rpartition(".")
            if leaf == PACKED:
                yield module

    def missing_shards(self) -> str | None:
        """Say which shards are missing, or that there are none; None if all are there."""
        missing = [problem.subject for problem in self.of_kind(Kind.MISSING)]
        if not missing and not self.of_kind(Kind.FOLDER):
            return None
        what = f"{', '.join(missing[:5])} missing" if missing else "found none"
        return f"{self.folder}: expected a checkpoint's safetensors shards, {what}"


def _open_config(folder: Path, problems: list[Problem]) -> dict[str, Any]:
    try:
        return read_config(folder)
    except FileNotFoundError:
        problems.append(Problem(Kind.CONFIG, CONFIG_NAME, "not there"))
    except (OSError, ValueError) as error:
        problems.append(Problem(Kind.CONFIG, CONFIG_NAME, str(error)))
    return {}


def _find_shards(
    folder: Path, problems: list[Problem]
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    """Return the index's map and metadata, and the names of all shards."""
    try:
        there = {file.name for file in folder.iterdir() if file.suffix == ".safetensors"}
    except OSError as error:
        problems.append(Problem(Kind.FOLDER, "", f"cannot be read: {error.strerror}"))
        return {}, {}, ()
    if (folder / INDEX_NAME).exists():
        try:
            located, metadata = read_index(folder)
        except (OSError, ValueError) as error:
            text = f"no index of safetensors shards: {error}"
            problems.append(Problem(Kind.INDEX, INDEX_NAME, text))
            return {}, {}, ()
        names = set(located.values())
        problems += [
            Problem(Kind.UNNAMED, name, "a shard that the index does not name")
            for name in sorted(there - names)
        ]
        return located, metadata, tuple(sorted(names))
    if not there:
        text = f"no {INDEX_NAME} and no *.safetensors file"
        problems.append(Problem(Kind.FOLDER, "", text))
    # Without an index, names such as model-00001-of-00096 say how many shards there should be.
    for match in [_NUMBERED.fullmatch(name) for name in there]:
        if match:
            prefix, position, suffix, count = match.groups()
            numbers = range(1, min(int(count), 10**5) + 1)
            there |= {f"{prefix}{number:0{len(position)}}{suffix}" for number in numbers}
    return {}, {}, tuple(sorted(there))


def _read_headers(
    folder: Path, shards: Collection[str], counts: Counter[str], problems: list[Problem]
) -> dict[str, Header]:
    headers = {}
    for name in shards:
        file = folder / name
        try:
            if file.exists() and not file.is_file():
                raise HeaderError("no regular file")
            headers[name] = read_full_header(file)
        except FileNotFoundError:
            if file.is_symlink():
                text = "a link to a file that is not there"
            elif name in counts:
                text = f"not there; the index names it for {counts[name]:,} tensors"
            else:
                text = "not there, by the names of the other shards"
            problems.append(Problem(Kind.MISSING, name, text))
        except (ValueError, OSError) as error:
            # Not a HeaderError alone: an index can hold names that no file can have.
            problems.append(Problem(Kind.SHARD, name, str(error)))
    return headers


def _find_owners(headers: dict[str, Header], problems: list[Problem]) -> dict[str, str]:
    owner: dict[str, str] = {}
    for name, header in headers.items():
        problems += [
            Problem(Kind.TWICE, tensor, f"in {shown(owner[tensor])} and again in {shown(name)}")
            for tensor in header.entries.keys() & owner.keys()
        ]
        owner.update(dict.fromkeys(header.entries, name))
    return owner


def _compare(
    located: dict[str, str], owner: dict[str, str], headers: dict[str, Header]
) -> Iterator[Problem]:
    """Yield where the index and the shards disagree; of shards that were read alone."""
    for tensor, name in located.items():
        found = owner.get(tensor)
        if found != name and name in headers:
            text = f"the index says {shown(name)}, it is in {shown(found or 'no shard')}"
            yield Problem(Kind.MISPLACED, tensor, text)
    if len(owner) != len(located) or owner.keys() != located.keys():
        for tensor in owner.keys() - located.keys():
            text = f"in {shown(owner[tensor])}, and not in the index"
            yield Problem(Kind.UNINDEXED, tensor, text)
