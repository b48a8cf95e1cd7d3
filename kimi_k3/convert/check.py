# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Proves one shard of a result: converts it again and compares, and writes nothing.

Whatever the manifest says, a byte that the conversion would not have written is found and named.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from kimi_k3.convert.kernel import library_agrees
from kimi_k3.convert.options import shown
from kimi_k3.convert.shard import Job, Work, read_exactly, read_into
from kimi_k3.convert.source import GROUP, PACKED, SCALE

_SHOWN = 3
# The library takes some tens of bytes for a value; rows of a few MB of values are enough.
_LIBRARY_VALUES = 1 << 21


def check_shard(job: Job, on_bytes: Callable[[int], None] = lambda count: None) -> list[str]:
    """Everything that is wrong with one shard of the result, or of the source since.

    Args:
        job: ``partial`` is the result's shard, ``expected`` what the manifest says of it.
        on_bytes: See `convert_shard`.

    Raises:
        OSError: A file cannot be read.
        ConversionFailed: The source holds values that cannot be converted.
    """
    expected = job.expected
    assert expected is not None
    size = Path(job.partial).stat().st_size
    if size != expected.result.bytes:
        return [f"expected {expected.result.bytes:,} bytes, found {size:,}"]
    with ExitStack() as stack:
        work = _Comparison(job, stack, on_bytes)
        work.run()
        found = work.record()
        strange = [] if work.differ else list(_decompressed(work))
    problems = strange
    for name, then, now in (
        ("the source", expected.source.sha256, found.source.sha256),
        ("the result", expected.result.sha256, found.result.sha256),
    ):
        if then != now:
            problems.append(f"SHA-256 of {name}: expected {then} by the manifest, found {now}")
    if work.layout.size != size:
        problems.append(f"expected {work.layout.size:,} bytes for this source, found {size:,}")
    elif work.differ:
        more = len(work.differ) - _SHOWN
        names = ", ".join(shown(name) for name in list(work.differ)[:_SHOWN])
        names += f" and {more} more" if more > 0 else ""
        problems.append(f"other bytes than the conversion of the source gives: {names}")
    return problems


def _decompressed(work: "_Comparison") -> Iterator[str]:
    """Modules, one of each shape, that compressed-tensors reads otherwise than this project."""
    if find_spec("compressed_tensors") is None:
        return
    whole = (m for m in work.job.modules if m.packed_in == m.scale_in == work.job.name)
    for module in {(m.rows, m.columns): m for m in whole}.values():
        rows = min(module.rows, max(1, _LIBRARY_VALUES // max(1, module.columns)))
        codes = work.read_result(f"{module.name}.{PACKED}", rows * module.columns // 2)
        scales = work.read_result(f"{module.name}.{SCALE}", rows * module.columns // GROUP * 2)
        if codes and not library_agrees(codes, scales, rows, module.columns):
            yield f"{shown(module.name)}: compressed-tensors decompresses it to other values"


class _Comparison(Work):
    """Reads where the conversion writes."""

    def open_result(self, stack: ExitStack) -> int:
        result = os.open(self.job.partial, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, result)
        # In the order of the tensors that were found to differ; the header is one of them.
        self.differ: dict[str, None] = {}
        self.there = memoryview(bytearray(0))
        return result

    def put(self, name: str, at: int, data: memoryview) -> bool:
        if len(self.there) < len(data):
            self.there = memoryview(bytearray(len(data)))
        there = self.there[: len(data)]
        if read_into(self.result, at, there) and there == data:
            return True
        self.differ[name] = None
        return False

    def read_result(self, name: str, count: int) -> memoryview:
        """The first bytes of a tensor of the result."""
        data = memoryview(bytearray(count))
        read_exactly(self.result, self.layout.starts[name], data)
        return data
