# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The pages name files that are there. (`make docs` fails on a page that the site lacks.)"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = r"vllm(?!/vllm-openai)|vllm_overlay|mxfp4_int4|k3_checkpoint|kimi_k3"
TOP = rf"\.buildkite|\.github|{PACKAGES}|tests|tools|benchmarks|docs"
# A path as it stands in code or in a command: `tests/a/test_b.py`, python benchmarks/c.py
NAMED = re.compile(rf"(?<![\w./<-])((?:{TOP})/[\w./-]*\w/?)(?![\w<*])")
LINKED = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_exist(page):
    text = page.read_text()
    named = {ROOT / path for path in NAMED.findall(text)}
    linked = {page.parent / path for path in LINKED.findall(text)}
    gone = sorted(str(path) for path in named | linked if not path.exists())
    assert not gone
