# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which modules are converted: globs on module names, whole layers only.

The experts of one layer are loaded as one matrix in one format. A selection that splits them could
be written down in config.json and loaded by nothing, so it is refused.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kimi_k3.convert.options import ConversionFailed, shown
from kimi_k3.convert.source import Module

_EXPERT = re.compile(r"^(.*\.experts|experts)\.\d+\..*")


@dataclass(frozen=True)
class Selection:
    """Modules to convert, and the containers on either side."""

    modules: dict[str, Module]
    converted: frozenset[str]
    kept: frozenset[str]


def container(module: str) -> str:
    """What is loaded in one format: ``...experts`` for an expert's matrix, else the module."""
    found = _EXPERT.match(module)
    return found[1] if found else module


def select(
    modules: dict[str, Module], include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> Selection:
    """Apply the globs.

    Args:
        modules: All in MXFP4.
        include: Case-sensitive globs in which ``*`` also matches dots; none means all.
        exclude: Globs that win over ``include``.

    Raises:
        ConversionFailed: A glob matches nothing, nothing is left, or a layer is split.
    """
    include, exclude = tuple(include), tuple(exclude)
    problems = [
        f"{glob!r}: matches none of {len(modules):,} modules"
        for glob in (*include, *exclude)
        if not any(fnmatchcase(name, glob) for name in modules)
    ]
    chosen = {
        name: module
        for name, module in modules.items()
        if (not include or any(fnmatchcase(name, glob) for glob in include))
        and not any(fnmatchcase(name, glob) for glob in exclude)
    }
    of_all, of_chosen = Counter(map(container, modules)), Counter(map(container, chosen))
    problems += [
        f"{shown(name)}: {count:,} of its {of_all[name]:,} modules are chosen; expected all or none"
        for name, count in of_chosen.items()
        if count != of_all[name]
    ]
    if not chosen and not problems:
        problems.append("include and exclude leave nothing to convert")
    if problems:
        example = shown(next(iter(modules)))
        raise ConversionFailed(
            "the chosen modules cannot be converted:",
            problems,
            f"Nothing was written. A module is named like {example}.",
        )
    return Selection(chosen, frozenset(of_chosen), frozenset(of_all.keys() - of_chosen.keys()))
