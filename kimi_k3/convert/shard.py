# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Converts one shard, a few MiB at a time: into a file under a temporary name, or in order to
compare the bytes with those of a result, whatever its manifest says.

What is in memory does not depend on the size of the shard or of any tensor in it.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import count
from queue import SimpleQueue

from k3_checkpoint.headers import Header, read_full_header
from kimi_k3.convert.digest import RunningDigest
from kimi_k3.convert.kernel import convert_rows, library_agrees, shape_bytes
from kimi_k3.convert.manifest import FileRecord, ShardRecord
from kimi_k3.convert.options import ConversionFailed, shown
from kimi_k3.convert.source import PACKED, SCALE, SHAPE, Module
from kimi_k3.convert.work_plan import Job, Tensor, plan_shard
from mxfp4_int4 import GROUP_SIZE

# Bytes of codes, or of anything else, that are in work at a time.
PIECE = 8 << 20
# One that is read, and those that wait for both checksums.
_BUFFERS = 6
_SHOWN = 3
# The library takes some tens of bytes for a value; rows of a few MB of values are enough.
_LIBRARY_VALUES = 1 << 21


def convert_shard(job: Job, on_bytes: Callable[[int], None] = lambda count: None) -> ShardRecord:
    """Write `job.result`, complete and on disk.

    Args:
        job: What to do.
        on_bytes: Told how many bytes of the source were dealt with since the last call.

    Returns:
        Checksums and sizes of both files.

    Raises:
        ConversionFailed: A value cannot be converted; the message names the module.
        OSError: A file cannot be read or written.
    """
    with ExitStack() as stack:
        work = _Conversion(job, stack, on_bytes)
        work.run()
        os.fsync(work.result)
        record = work.record()
        # Nobody reads it soon, and what others have in the page cache is worth more.
        os.posix_fadvise(work.result, 0, 0, os.POSIX_FADV_DONTNEED)
        return record


def check_shard(
    job: Job, expected: ShardRecord, on_bytes: Callable[[int], None] = lambda count: None
) -> tuple[ShardRecord, list[str]]:
    """Convert a shard again and compare; writes nothing.

    Args:
        job: ``result`` is the shard to prove.
        expected: What the manifest says of it.
        on_bytes: See `convert_shard`.

    Returns:
        Checksums and sizes of both files as they are, and everything that is wrong with them.

    Raises:
        OSError: A file cannot be read.
        ConversionFailed: The source holds values that cannot be converted.
    """
    with ExitStack() as stack:
        work = _Comparison(job, stack, on_bytes)
        work.run()
        found = work.record()
        problems = [] if work.differ else list(work.misread_by_library())
    for name, then, now in (
        ("the source", expected.source.sha256, found.source.sha256),
        ("the result", expected.result.sha256, found.result.sha256),
    ):
        if then != now:
            problems.append(f"SHA-256 of {name}: expected {then} by the manifest, found {now}")
    size = found.result.bytes
    if work.layout.size != size:
        problems.append(f"expected {work.layout.size:,} bytes for this source, found {size:,}")
    elif work.differ:
        more = len(work.differ) - _SHOWN
        names = ", ".join(shown(name) for name in list(work.differ)[:_SHOWN])
        names += f" and {more} more" if more > 0 else ""
        problems.append(f"other bytes than the conversion of the source gives: {names}")
    return found, problems


class _Conversion:
    """The open files, buffers and checksums of one job."""

    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL

    def __init__(self, job: Job, stack: ExitStack, on_bytes: Callable[[int], None]) -> None:
        self.job = job
        self.on_bytes = on_bytes
        self.headers: dict[str, Header] = {}
        self.files: dict[str, int] = {}
        for name in (job.name, *(n for m in job.modules for n in (m.packed_in, m.scale_in))):
            if name not in self.files:
                path = job.source / name
                self.headers[name] = read_full_header(path)
                self.files[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, self.files[name])
                for advice in (os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_NOREUSE):
                    os.posix_fadvise(self.files[name], 0, 0, advice)
        self.source = self.files[job.name]
        self.layout = plan_shard(job.name, self.headers[job.name], job.modules)
        self.result = os.open(job.result, self.flags | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, self.result)
        size = self.headers[job.name].size
        self.source_digest = RunningDigest(self.source, size, whole=True)
        stack.callback(self.source_digest.stop)
        there = os.fstat(self.result).st_size
        size = there or self.layout.size
        self.result_digest = RunningDigest(self.result, size, whole=there > 0)
        stack.callback(self.result_digest.stop)
        self.buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_BUFFERS):
            self.buffers.put(memoryview(bytearray(PIECE)))

    def run(self) -> None:
        """Go through the source once, in its order."""
        # All that is known beforehand comes first in the result.
        self.write("the header", 0, memoryview(self.layout.header))
        for module in self.job.modules:
            if module.packed_in == self.job.name:
                shape = shape_bytes(module.rows, module.columns)
                name = f"{module.name}.{SHAPE}"
                self.write(name, self.layout.starts[name], memoryview(shape))
        for _, step in sorted(self.steps(), key=lambda step: step[0]):
            step()

    def steps(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """What is to be done, each with the place in the source where it reads."""
        for tensor in self.layout.tensors:
            if tensor.source is not None:
                yield tensor.source, partial(self.copy, tensor, tensor.source)
        for module in self.job.modules:
            at = self.headers[module.packed_in].spans[f"{module.name}.{PACKED}"][0]
            # Codes of another shard, of which this one has the scales, come last.
            place = at if module.packed_in == self.job.name else self.layout.size + at
            yield place, partial(self.convert, module)

    def copy(self, tensor: Tensor, source: int) -> None:
        """Copy a tensor that stays as it is."""
        for at in range(0, tensor.nbytes, PIECE):
            size = min(PIECE, tensor.nbytes - at)
            buffer = self.buffers.get()
            piece = buffer[:size]
            read_exactly(self.source, source + at, piece)
            calls = count(1)

            def release(buffer: memoryview = buffer, calls: Iterator[int] = calls) -> None:
                # One step for the interpreter, so that of two threads only one sees the 2.
                if next(calls) == 2:
                    self.buffers.put(buffer)

            self.source_digest.offer(source + at, piece, release)
            self.write(tensor.name, self.layout.starts[tensor.name] + at, piece, release)
            self.on_bytes(size)

    def convert(self, module: Module) -> None:
        """Convert a module, rows at a time."""
        packed, scale = f"{module.name}.{PACKED}", f"{module.name}.{SCALE}"
        codes_row, scales_row = module.columns // 2, module.columns // GROUP_SIZE
        codes_at = self.headers[module.packed_in].spans[packed][0]
        scales_at = self.headers[module.scale_in].spans[scale][0]
        starts = self.layout.starts
        # Nothing to convert, however many rows of it there are.
        if not codes_row:
            return
        # A row wider than a piece is still worked on whole.
        step = max(1, PIECE // codes_row)
        for row in range(0, module.rows, step):
            rows = min(step, module.rows - row)
            buffer = self.buffers.get()
            if len(buffer) < rows * codes_row:
                buffer = memoryview(bytearray(rows * codes_row))
            codes = buffer[: rows * codes_row]
            scales = memoryview(bytearray(rows * scales_row))
            read_exactly(self.files[module.packed_in], codes_at + row * codes_row, codes)
            read_exactly(self.files[module.scale_in], scales_at + row * scales_row, scales)
            try:
                new, new_scales = convert_rows(
                    codes, scales, rows, self.job.scale_rule, self.job.device
                )
            except ValueError as error:
                where = _of_module(error, row)
                raise ConversionFailed(
                    f"{shown(self.job.name)}: {shown(module.name)}, {where}"
                ) from error
            release = partial(self.buffers.put, buffer)
            if module.packed_in == self.job.name:
                self.source_digest.offer(codes_at + row * codes_row, codes, release)
                self.write(packed, starts[packed] + row * codes_row, new)
                self.on_bytes(len(codes))
            else:
                release()
            if module.scale_in == self.job.name:
                if module.packed_in == module.scale_in and scales_at == codes_at + len(codes):
                    self.source_digest.offer(scales_at, scales)
                self.write(scale, starts[scale] + row * 2 * scales_row, new_scales)
                self.on_bytes(len(scales))

    def write(
        self, name: str, at: int, data: memoryview, release: Callable[[], None] = lambda: None
    ) -> None:
        """Put bytes in their place; they must not change before `release` is called."""
        if self.put(name, at, data):
            self.result_digest.offer(at, data, release)
        else:
            release()

    def put(self, name: str, at: int, data: memoryview) -> bool:
        """Write bytes of the tensor `name`. Whether the file holds them now."""
        while data:
            written = os.pwrite(self.result, data, at)
            data, at = data[written:], at + written
        return True

    def record(self) -> ShardRecord:
        """Wait for the checksums."""
        header = self.headers[self.job.name]
        return ShardRecord(
            FileRecord(header.size, self.source_digest.finish()),
            header.digest,
            FileRecord(os.fstat(self.result).st_size, self.result_digest.finish()),
            tuple(module.name for module in self.job.modules),
        )


class _Comparison(_Conversion):
    """Reads where the conversion writes."""

    flags = os.O_RDONLY

    def __init__(self, job: Job, stack: ExitStack, on_bytes: Callable[[int], None]) -> None:
        super().__init__(job, stack, on_bytes)
        # In the order of the tensors that were found to differ; the header is one of them.
        self.differ: dict[str, None] = {}
        self.there = memoryview(bytearray(0))

    def put(self, name: str, at: int, data: memoryview) -> bool:
        if len(self.there) < len(data):
            self.there = memoryview(bytearray(len(data)))
        there = self.there[: len(data)]
        if _read_into(self.result, at, there) and there == data:
            return True
        self.differ[name] = None
        return False

    def misread_by_library(self) -> Iterator[str]:
        """Modules, one of each shape, that compressed-tensors reads otherwise than this project."""
        if find_spec("compressed_tensors") is None:
            return
        whole = (m for m in self.job.modules if m.packed_in == m.scale_in == self.job.name)
        for module in {(m.rows, m.columns): m for m in whole}.values():
            rows = min(module.rows, max(1, _LIBRARY_VALUES // max(1, module.columns)))
            codes = memoryview(bytearray(rows * module.columns // 2))
            scales = memoryview(bytearray(rows * module.columns // GROUP_SIZE * 2))
            for leaf, data in ((PACKED, codes), (SCALE, scales)):
                read_exactly(self.result, self.layout.starts[f"{module.name}.{leaf}"], data)
            if codes and not library_agrees(codes, scales, rows, module.columns):
                yield f"{shown(module.name)}: compressed-tensors decompresses it to other values"


def _of_module(error: ValueError, first: int) -> str:
    """What the conversion says of some rows, counted from the module's first one instead."""
    return re.sub(
        r"^expert 0, row (\d+)", lambda found: f"row {first + int(found[1]):,}", str(error)
    )


def _read_into(file: int, at: int, view: memoryview) -> bool:
    """Fill the view; False where the file ends before."""
    while view:
        size = os.preadv(file, [view], at)
        if size == 0:
            return False
        view, at = view[size:], at + size
    return True


def read_exactly(file: int, at: int, view: memoryview) -> None:
    """Fill the view.

    Raises:
        OSError: The file ends before, or cannot be read.
    """
    if not _read_into(file, at, view):
        raise OSError(f"a shard ends before byte {at + len(view):,}: it became shorter meanwhile")
