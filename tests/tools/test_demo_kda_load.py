# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The demonstration as a user runs it: what it prints is what the loads did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_figures():
    process = subprocess.run(
        [sys.executable, "tools/demo_kda_load.py", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout)
    # Six whole bf16 sources of a layer at hidden size 128: q, k, v, g, f_a and beta.
    source_bytes = (4 * 96 * 128 + 128 + 96) * 128 * 2
    for record in results["stock"]:
        assert record["shards"] == 6
        assert record["completed_at"] is None
        assert record["held_bytes"] == source_bytes
        assert record["alignment_nan"]
    for record in results["overlay"]:
        assert record["completed_at"] == record["shards"] == 6
        assert record["held_bytes"] == 0
        assert record["alignment_zero"]
    assert all(r["alignment_rows"] == 4 for records in results.values() for r in records)
