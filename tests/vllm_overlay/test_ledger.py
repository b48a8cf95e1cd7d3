# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The ledger page shows the heads of the files, and every amendment has a ledger."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

from vllm_overlay.ledger import FIELDS, entries, parse, render
from vllm_overlay.tree import compare_installed

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"

LEDGER = """Summary.

Ledger
    What: one name
        and its value.
    Why: a cause: with a colon.
    How: wrap.
    Upstream: none yet.
    Remove when: merged.
"""


def test_page_is_up_to_date():
    assert PAGE.read_text() == render(entries()), (
        "run: python -m vllm_overlay.ledger > docs/ledger.md"
    )


def test_every_amendment_has_a_ledger_and_no_new_module_has():
    tree = compare_installed()
    with_ledger = {entry.module for entry in entries() if entry.fields}
    assert with_ledger == set(tree.amendments)


LEDGERS = [entry for entry in entries() if entry.fields]


@pytest.mark.parametrize("entry", LEDGERS, ids=attrgetter("module"))
def test_entry_links_upstream_or_says_what_to_file(entry):
    upstream = entry.fields["Upstream"]
    links = re.findall(r"https://github\.com/[\w-]+/[\w.-]+/(?:issues|pull)/\d+\b", upstream)
    assert links or re.search(r"to file: \S.{20}", upstream), upstream
    assert upstream.count("https://") == len(links), f"not an issue or a pull request: {upstream}"


def test_parse():
    assert parse(LEDGER) == {
        "What": "one name and its value.",
        "Why": "a cause: with a colon.",
        "How": "wrap.",
        "Upstream": "none yet.",
        "Remove when": "merged.",
    }
    assert parse("No ledger here.") == {}


@pytest.mark.parametrize("field", FIELDS)
def test_missing_and_empty_fields_are_refused(field):
    lines = [line for line in LEDGER.splitlines() if "and its value" not in line]
    without = [line for line in lines if not line.strip().startswith(f"{field}:")]
    empty = [f"    {field}:" if line.strip().startswith(f"{field}:") else line for line in lines]
    for broken in (without, empty):
        with pytest.raises(ValueError, match="expected the fields What, Why"):
            parse("\n".join(broken))


def test_faulty_file_is_named(tmp_path):
    (tmp_path / "a.py").write_text('"""Summary.\n\nLedger\n    nonsense\n"""\n')
    with pytest.raises(ValueError, match=r"a\.py: ledger: expected a field"):
        entries(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"a\.py: expected a docstring"):
        entries(tmp_path)
