# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How long `Checkpoint.open` and the check of every tensor take at Kimi-K3's full size.

    python benchmarks/open_checkpoint.py                  # writes 96 headers first, 140 MB of disk
    python benchmarks/open_checkpoint.py --folder k3      # of a checkpoint that is there

Each round is a fresh process: seconds by the clock and of CPU, and its peak memory, all without the
interpreter's own start. The files lie in the page cache. Exit code 1 where a checkpoint is not
found sound, or a bar is missed by the best round: 3 s of CPU and 400 MiB on one core.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _options import json_file, positive
from _result import machine, write

SECONDS, MEMORY = 3.0, 400 << 20


def measure(folder: Path) -> dict[str, Any]:
    """Child: open a checkpoint, check it, and say what that took."""
    wall, cpu = time.perf_counter(), time.process_time()
    from k3_checkpoint import Checkpoint
    from k3_checkpoint.check import find_problems
    from k3_checkpoint.spec import ModelSpec

    checkpoint = Checkpoint.open(folder)
    problems = list(checkpoint.problems) or find_problems(
        checkpoint, ModelSpec.from_config(checkpoint.config), checkpoint.declared
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    status = Path("/proc/self/status").read_text()
    return {
        "shards": len(checkpoint.headers),
        "tensors": len(checkpoint.owner),
        "problems": [str(problem) for problem in problems],
        "wall": wall,
        "cpu": cpu,
        "peak_rss": int(status.split("VmHWM:")[1].split()[0]) * 1024,
    }


def run(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure in fresh processes."""
    command = [sys.executable, __file__, "--child", "--folder", str(folder)]
    return [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(rounds)
    ]


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="a checkpoint; default: one of headers alone")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=json_file)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder
        if folder is None:
            from k3_checkpoint.presets import PRESETS
            from k3_checkpoint.write import write_checkpoint

            folder = Path(temporary) / "k3"
            write_checkpoint(folder, PRESETS["k3-shapes"], shards=96, headers_only=True)
        found = run(folder, options.rounds)
    for one in found:
        print(
            f"{one['shards']} shards, {one['tensors']:,} tensors: {one['wall']:.2f} s, "
            f"{one['cpu']:.2f} s of CPU, {one['peak_rss'] / 2**20:,.0f} MiB"
        )
    write(options.json, "open_checkpoint", machine(1), found)
    if found[0]["problems"]:
        raise SystemExit(f"error: {'; '.join(found[0]['problems'][:5])}")
    if min(one["cpu"] for one in found) > SECONDS or max(one["peak_rss"] for one in found) > MEMORY:
        raise SystemExit(f"error: expected at most {SECONDS} s of CPU and {MEMORY >> 20} MiB")


if __name__ == "__main__":
    main()
