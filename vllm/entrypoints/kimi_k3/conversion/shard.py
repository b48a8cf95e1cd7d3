# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Converts one shard, a few MiB at a time, into a file under a temporary name.

What is in memory does not depend on the size of the shard or of any tensor in it.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from vllm.entrypoints.kimi_k3.checkpoint.headers import read_full_header
from vllm.entrypoints.kimi_k3.conversion.kernel import convert_rows, shape_bytes
from vllm.entrypoints.kimi_k3.conversion.layout import plan_shard
from vllm.entrypoints.kimi_k3.conversion.manifest import FileRecord, ShardRecord
from vllm.entrypoints.kimi_k3.conversion.options import ConversionFailed, shown
from vllm.entrypoints.kimi_k3.conversion.source import GROUP, PACKED, SCALE, SHAPE, Module

# Bytes of codes, or of anything else, that are in work at a time.
PIECE = 8 << 20


@dataclass(frozen=True)
class Job:
    """One shard to convert.

    Attributes:
        source: The source's folder.
        name: The shard's file name.
        partial: Where to write.
        modules: To convert, each with a tensor in this shard.
        scale_rule: Of the conversion.
        device: "cpu" or "cuda".
    """

    source: str
    name: str
    partial: str
    modules: tuple[Module, ...]
    scale_rule: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        modules = tuple(Module(**module) for module in found["modules"])
        return cls(**(found | {"modules": modules}))


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
    folder = Path(job.source)
    header = read_full_header(folder / job.name)
    layout = plan_shard(job.name, header, job.modules)
    with (
        (folder / job.name).open("rb", buffering=0) as source,
        Path(job.partial).open("xb+", buffering=0) as result,
    ):
        _write(result.fileno(), layout.header, 0)
        for tensor in layout.tensors:
            if tensor.source is not None:
                for at in range(0, tensor.nbytes, PIECE):
                    count = min(PIECE, tensor.nbytes - at)
                    piece = _read(source.fileno(), tensor.source + at, count)
                    _write(result.fileno(), piece, layout.starts[tensor.name] + at)
                    on_bytes(count)
        for module in job.modules:
            _convert_module(job, module, layout.starts, result.fileno(), on_bytes)
        os.fsync(result.fileno())
        return ShardRecord(
            FileRecord(header.size, _digest(source.fileno())),
            header.digest,
            FileRecord(layout.size, _digest(result.fileno())),
            tuple(module.name for module in job.modules),
        )


def _convert_module(
    job: Job,
    module: Module,
    starts: dict[str, int],
    result: int,
    on_bytes: Callable[[int], None],
) -> None:
    folder = Path(job.source)
    packed, scale = f"{module.name}.{PACKED}", f"{module.name}.{SCALE}"
    codes_row, scales_row = module.columns // 2, module.columns // GROUP
    with (
        (folder / module.packed_in).open("rb", buffering=0) as codes_file,
        (folder / module.scale_in).open("rb", buffering=0) as scales_file,
    ):
        codes_at = read_full_header(folder / module.packed_in).spans[packed][0]
        scales_at = read_full_header(folder / module.scale_in).spans[scale][0]
        step = max(1, PIECE // max(1, codes_row))
        for row in range(0, module.rows, step):
            rows = min(step, module.rows - row)
            codes = _read(codes_file.fileno(), codes_at + row * codes_row, rows * codes_row)
            scales = _read(scales_file.fileno(), scales_at + row * scales_row, rows * scales_row)
            try:
                new, new_scales = convert_rows(codes, scales, rows, job.scale_rule, job.device)
            except ValueError as error:
                raise ConversionFailed(f"{shown(module.name)}, from row {row}: {error}") from error
            if packed in starts:
                _write(result, new, starts[packed] + row * codes_row)
            if scale in starts:
                _write(result, new_scales, starts[scale] + row * 2 * scales_row)
            on_bytes(len(codes) + len(scales))
    if packed in starts:
        shape = shape_bytes(module.rows, module.columns)
        _write(result, shape, starts[f"{module.name}.{SHAPE}"])


def _read(file: int, at: int, count: int) -> bytearray:
    """Exactly `count` bytes."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = os.preadv(file, [view], at)
        if got == 0:
            raise OSError(f"a shard ends at byte {at:,}: it became shorter while it was read")
        view, at = view[got:], at + got
    return buffer


def _write(file: int, data, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count


def _digest(file: int) -> str:
    digest = sha256()
    buffer = memoryview(bytearray(PIECE))
    at = 0
    while count := os.preadv(file, [buffer], at):
        digest.update(buffer[:count])
        at += count
    return digest.hexdigest()
