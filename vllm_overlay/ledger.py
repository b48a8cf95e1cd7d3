# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Reads the ledger at the head of every overlay file and renders the page that shows them all.

The files are parsed, never run. ``python -m vllm_overlay.ledger`` prints the page.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.tree import PACKAGE, overlay_root

FIELDS = ("What", "Why", "How", "Upstream", "Remove when")

_PREAMBLE = """\
# Ledger

Every file that this project lays over vLLM, from the heads of the files themselves. Written by
`python -m vllm_overlay.ledger > docs/ledger.md`; a test compares the two.
"""


@dataclass(frozen=True)
class Entry:
    """One overlay file.

    Attributes:
        module: The module that it is, or amends.
        summary: First line of its docstring.
        fields: The ledger's fields in order; empty for a new module, which replaces nothing.
    """

    module: str
    summary: str
    fields: dict[str, str]


def parse(docstring: str) -> dict[str, str]:
    """Return the fields of the ledger in a docstring, or {} when it has none.

    Raises:
        ValueError: A field is missing, unknown, out of order or empty.
    """
    _, marker, body = docstring.partition("\nLedger\n")
    if not marker:
        return {}
    fields: dict[str, str] = {}
    for line in body.strip().splitlines():
        match = re.match(r"\s*([A-Z][a-z ]+): *(.*)", line)
        if match and match[1] in FIELDS:
            fields[match[1]] = match[2].strip()
        elif not fields:
            raise ValueError(f"ledger: expected a field of {', '.join(FIELDS)}, found {line!r}")
        else:
            last = next(reversed(fields))
            fields[last] = f"{fields[last]} {line.strip()}".strip()
    if tuple(fields) != FIELDS or not all(fields.values()):
        raise ValueError(
            f"ledger: expected the fields {', '.join(FIELDS)}, each with a text, found {fields}"
        )
    return fields


def entries(root: Path | None = None) -> list[Entry]:
    """Return an entry for every file under the overlay tree, sorted by module.

    Raises:
        ValueError: A file has no docstring or a faulty ledger; it is named.
    """
    root = root or overlay_root()
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join((PACKAGE, *(part for part in parts if part != "__init__")))
        docstring = ast.get_docstring(ast.parse(file.read_text()))
        if not docstring:
            raise ValueError(f"{file}: expected a docstring that says what the file is for")
        try:
            fields = parse(docstring)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        found.append(Entry(module, docstring.splitlines()[0], fields))
    return found


def render(found: list[Entry]) -> str:
    """Return the page in Markdown."""
    lines = [_PREAMBLE, "## Amendments\n"]
    for entry in found:
        if entry.fields:
            lines.append(f"### `{entry.module}`\n\n{entry.summary}\n")
            lines += [f"- **{name}:** {text}" for name, text in entry.fields.items()]
            lines.append("")
    lines += ["## New modules\n", "| module | what it is for |", "| --- | --- |"]
    lines += [f"| `{entry.module}` | {entry.summary} |" for entry in found if not entry.fields]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(entries()), end="")
