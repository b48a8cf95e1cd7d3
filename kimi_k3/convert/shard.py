# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Converts one shard, a few MiB at a time, into a file under a temporary name.

What is in memory does not depend on the size of the shard or of any tensor in it.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, Self

from k3_checkpoint.headers import Header, read_full_header
from kimi_k3.convert.digest import RunningDigest
from kimi_k3.convert.kernel import convert_rows, shape_bytes
from kimi_k3.convert.layout import Tensor, plan_shard
from kimi_k3.convert.manifest import FileRecord, ShardRecord
from kimi_k3.convert.options import ConversionFailed, shown
from kimi_k3.convert.source import GROUP, PACKED, SCALE, SHAPE, Module

# Bytes of codes, or of anything else, that are in work at a time.
PIECE = 8 << 20
# The conversion's words for a place in what it was given.
_PLACE = re.compile(r"^expert 0, row (\d+)")
# One that is read, and those that wait for both checksums.
_BUFFERS = 6


@dataclass(frozen=True)
class Job:
    """One shard to convert.

    Attributes:
        source: The source's folder.
        name: The shard's file name.
        partial: Where to write; with ``expected``, what to read and compare.
        modules: To convert, each with a tensor in this shard.
        scale_rule: Of the conversion.
        device: "cpu" or "cuda".
        expected: For `check_shard`: what the manifest says.
    """

    source: str
    name: str
    partial: str
    modules: tuple[Module, ...]
    scale_rule: str
    device: str
    expected: ShardRecord | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        modules = tuple(Module(**module) for module in found["modules"])
        expected = found["expected"] and ShardRecord.from_json(found["expected"])
        return cls(**(found | {"modules": modules, "expected": expected}))


def convert_shard(job: Job, on_bytes: Callable[[int], None] = lambda count: None) -> ShardRecord:
    """Write `job.partial`, complete and on disk.

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
        work = Work(job, stack, on_bytes)
        work.run()
        os.fsync(work.result)
        record = work.record()
        # Nobody reads it soon, and what others have in the page cache is worth more.
        os.posix_fadvise(work.result, 0, 0, os.POSIX_FADV_DONTNEED)
        return record


class Work:
    """The open files, buffers and checksums of one job."""

    def __init__(self, job: Job, stack: ExitStack, on_bytes: Callable[[int], None]) -> None:
        self.job = job
        self.on_bytes = on_bytes
        self.headers: dict[str, Header] = {}
        self.files: dict[str, int] = {}
        for name in (job.name, *(n for m in job.modules for n in (m.packed_in, m.scale_in))):
            if name not in self.files:
                path = Path(job.source) / name
                self.headers[name] = read_full_header(path)
                self.files[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, self.files[name])
                for advice in (os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_NOREUSE):
                    os.posix_fadvise(self.files[name], 0, 0, advice)
        self.source = self.files[job.name]
        self.layout = plan_shard(job.name, self.headers[job.name], job.modules)
        self.result = self.open_result(stack)
        size = self.headers[job.name].size
        self.source_digest = RunningDigest(self.source, size, whole=True)
        stack.callback(self.source_digest.stop)
        size = os.fstat(self.result).st_size or self.layout.size
        self.result_digest = RunningDigest(self.result, size, whole=job.expected is not None)
        stack.callback(self.result_digest.stop)
        self.buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_BUFFERS):
            self.buffers.put(memoryview(bytearray(PIECE)))

    def open_result(self, stack: ExitStack) -> int:
        """The result's descriptor."""
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        result = os.open(self.job.partial, new, 0o666)
        stack.callback(os.close, result)
        return result

    def run(self) -> None:
        """Go through the source once, in its order."""
        self.write_head()
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

    def write_head(self) -> None:
        """Write all that is known beforehand, which comes first in the file."""
        self.write("the header", 0, memoryview(self.layout.header))
        for module in self.job.modules:
            if module.packed_in == self.job.name:
                shape = shape_bytes(module.rows, module.columns)
                name = f"{module.name}.{SHAPE}"
                self.write(name, self.layout.starts[name], memoryview(shape))

    def copy(self, tensor: Tensor, source: int) -> None:
        """Copy a tensor that stays as it is."""
        for at in range(0, tensor.nbytes, PIECE):
            count = min(PIECE, tensor.nbytes - at)
            buffer = self.buffers.get()
            piece = buffer[:count]
            read_exactly(self.source, source + at, piece)
            back = _Shared(2, partial(self.buffers.put, buffer))
            self.source_digest.offer(source + at, piece, back)
            self.write(tensor.name, self.layout.starts[tensor.name] + at, piece, back)
            self.on_bytes(count)

    def convert(self, module: Module) -> None:
        """Convert a module, rows at a time."""
        packed, scale = f"{module.name}.{PACKED}", f"{module.name}.{SCALE}"
        codes_row, scales_row = module.columns // 2, module.columns // GROUP
        codes_at = self.headers[module.packed_in].spans[packed][0]
        scales_at = self.headers[module.scale_in].spans[scale][0]
        starts = self.layout.starts
        # Nothing to convert, however many rows of it there are.
        if not codes_row:
            return
        # A row wider than a piece is still worked on whole.
        step = max(1, PIECE // max(1, codes_row))
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
                where = _of_module(str(error), row)
                raise ConversionFailed(
                    f"{shown(self.job.name)}: {shown(module.name)}, {where}"
                ) from error
            back = partial(self.buffers.put, buffer)
            if module.packed_in == self.job.name:
                self.source_digest.offer(codes_at + row * codes_row, codes, back)
                self.write(packed, starts[packed] + row * codes_row, new)
                self.on_bytes(len(codes))
            else:
                back()
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
            count = os.pwrite(self.result, data, at)
            data, at = data[count:], at + count
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


def _of_module(message: str, first: int) -> str:
    """What the conversion says of some rows, counted from the module's first one instead."""
    return _PLACE.sub(lambda found: f"row {first + int(found[1]):,}", message)


class _Shared:
    """Calls something when the last of several has called this."""

    def __init__(self, count: int, last: Callable[[], None]) -> None:
        self.count = count
        self.last = last
        self.lock = Lock()

    def __call__(self) -> None:
        with self.lock:
            self.count -= 1
            done = self.count == 0
        if done:
            self.last()


def read_into(file: int, at: int, view: memoryview) -> bool:
    """Fill the view; False where the file ends before."""
    while view:
        count = os.preadv(file, [view], at)
        if count == 0:
            return False
        view, at = view[count:], at + count
    return True


def read_exactly(file: int, at: int, view: memoryview) -> None:
    """Fill the view.

    Raises:
        OSError: The file ends before, or cannot be read.
    """
    if not read_into(file, at, view):
        raise OSError(f"a shard ends before byte {at + len(view):,}: it became shorter meanwhile")
