# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Where a converted checkpoint and its source keep each matrix, and everything wrong with that.

Reads indexes, headers and the manifest; of tensors only the rows that are asked for.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from k3_checkpoint import Checkpoint, Kind
from k3_checkpoint.formats import PACKED, SCALE
from k3_checkpoint.headers import Entry
from k3_checkpoint.problems import listed
from k3_checkpoint.shards import INDEX_NAME
from kimi_k3.convert.manifest import MANIFEST_NAME, Manifest
from kimi_k3.convert.source import WORK_NAME
from mxfp4_int4 import GROUP_SIZE

_SHOWN = 10
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ReportError(ValueError):
    """A checkpoint cannot be reported on; the message lists why."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        lines = listed(problems, _SHOWN)
        super().__init__("\n".join([f"{folder} cannot be reported on:", *lines]))
        self.problems = problems


@dataclass(frozen=True)
class Rows:
    """A tensor `[N, bytes of a row]` in a file."""

    file: Path
    start: int
    rows: int
    row_bytes: int

    def read(self, first: int, count: int) -> bytearray:
        """Return the bytes of `count` rows.

        Raises:
            ReportError: The file has become shorter.
        """
        wanted = bytearray(count * self.row_bytes)
        view, done = memoryview(wanted), 0
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start + first * self.row_bytes)
            while done < len(wanted):
                read = file.readinto(view[done:])
                if not read:
                    raise ReportError(self.file, ["ended early: it was changed meanwhile"])
                done += read
        return wanted


@dataclass(frozen=True)
class Matrix:
    """One int4 matrix `[N, K]` and, if there is a source, its MXFP4 form.

    Attributes:
        name: Module, such as ``...layers.1.block_sparse_moe.experts.3.w1``.
        rows: N.
        columns: K.
        codes: int32 words of eight codes.
        scales: bfloat16.
        source_codes: Two e2m1 codes a byte.
        source_scales: e8m0 bytes.
    """

    name: str
    rows: int
    columns: int
    codes: Rows
    scales: Rows
    source_codes: Rows | None = None
    source_scales: Rows | None = None

    @property
    def layer(self) -> int:
        """Index of the layer; -1 for a matrix outside of layers."""
        found = _LAYER.search(self.name)
        return int(found[1]) if found else -1

    @property
    def projection(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read all headers of a checkpoint.

    Raises:
        ReportError: Shards are missing or damaged.
    """
    if not folder.is_dir():
        raise ReportError(folder, ["expected a checkpoint's folder, found none"])
    if (folder / WORK_NAME).exists():
        raise ReportError(
            folder, ["the conversion is not finished: run kimi-k3 convert with --resume first"]
        )
    if (folder / MANIFEST_NAME).exists() and not (folder / INDEX_NAME).exists():
        problem = (
            f"{INDEX_NAME}: not there, so the conversion is not finished, or damaged: run "
            "kimi-k3 convert with --resume first"
        )
        raise ReportError(folder, [problem])
    checkpoint = Checkpoint.open(folder)
    if (missing := checkpoint.missing_shards()) is not None:
        raise ReportError(folder, [missing])
    if problems := checkpoint.of_kind(Kind.INDEX, Kind.SHARD, Kind.TWICE):
        raise ReportError(folder, [str(problem) for problem in problems])
    return checkpoint


def read_manifest(folder: Path) -> Manifest | None:
    """Return what the conversion left; None where something else made the checkpoint.

    Raises:
        ReportError: It is damaged.
    """
    if not (folder / MANIFEST_NAME).exists():
        return None
    try:
        return Manifest.read(folder)
    except (OSError, ValueError) as error:
        raise ReportError(folder, [str(error)]) from error


def find_matrices(result: Checkpoint, manifest: Manifest | None) -> list[Matrix]:
    """Return the int4 matrices of a converted checkpoint, by layer, projection and name.

    Raises:
        ReportError: With everything that is wrong with them; or there are none.
    """
    problems = [] if manifest is None else list(_differences(result, manifest))
    found, mxfp4 = [], 0
    for module in result.packed_modules():
        packed, scale = f"{module}.{PACKED}", f"{module}.{SCALE}"
        codes = result.headers[result.owner[packed]].entries[packed]
        if codes.dtype == "U8":
            mxfp4 += 1
        elif problem := _check(codes, result.entry(scale)):
            problems.append(f"{module}: {problem}")
        else:
            rows, words = codes.shape
            places = _rows(result, packed), _rows(result, scale)
            found.append(Matrix(module, rows, words * 8, *places))
    if not found and not problems:
        kind = "its experts are MXFP4" if mxfp4 else f"no {PACKED} in any shard"
        problems.append(f"nothing in int4: {kind}. Expected what kimi-k3 convert has written")
    if problems:
        raise ReportError(result.folder, problems)
    return sorted(found, key=lambda matrix: (matrix.layer, matrix.projection, _natural(matrix)))


def _rows(checkpoint: Checkpoint, tensor: str) -> Rows:
    """Return where a two-dimensional tensor's rows are."""
    shard = checkpoint.owner[tensor]
    start, stop = checkpoint.headers[shard].spans[tensor]
    count = checkpoint.headers[shard].entries[tensor].shape[0]
    return Rows(checkpoint.folder / shard, start, count, (stop - start) // max(1, count))


def _natural(matrix: Matrix) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", matrix.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _differences(result: Checkpoint, manifest: Manifest) -> Iterator[str]:
    """Yield where a checkpoint is not what its conversion left, as far as sizes tell."""
    for name, record in manifest.shards.items():
        header = result.headers.get(name)
        if header is None:
            yield f"{name}: not in the checkpoint, and the conversion wrote it"
        elif header.size != record.result.bytes:
            yield (
                f"{name}: expected {record.result.bytes:,} bytes by {MANIFEST_NAME}, found "
                f"{header.size:,}"
            )


def _check(packed: Entry, scale: Entry | None) -> str:
    """Return what is wrong with a matrix; empty if nothing is."""
    if scale is None:
        return f"{PACKED} without its {SCALE}"
    if packed.dtype != "I32" or len(packed.shape) != 2 or packed.shape[1] % (GROUP_SIZE // 8):
        return f"{PACKED}: expected I32 [N, K/8] with K a multiple of {GROUP_SIZE}, found {packed}"
    expected = (packed.shape[0], packed.shape[1] * 8 // GROUP_SIZE)
    if (scale.dtype, scale.shape) != ("BF16", expected):
        return f"{SCALE}: expected BF16 {list(expected)}, found {scale}"
    return ""


def with_source(
    matrices: list[Matrix], source: Checkpoint, manifest: Manifest | None
) -> list[Matrix]:
    """Return the matrices with the places of their MXFP4 forms.

    Raises:
        ReportError: The source lacks one, or is not the one that was converted.
    """
    problems = []
    if manifest is not None:
        for name, record in manifest.shards.items():
            header = source.headers.get(name)
            if header is None:
                problems.append(f"{name}: not there, and the checkpoint was converted from it")
            elif header.digest != record.source_header or header.size != record.source.bytes:
                problems.append(f"{name}: not the shard that was converted")
    paired = []
    for matrix in matrices:
        names = f"{matrix.name}.{PACKED}", f"{matrix.name}.{SCALE}"
        codes, scales = map(source.entry, names)
        if codes is None or scales is None:
            problems.append(f"{matrix.name}: not there, or without codes or scales in MXFP4")
            continue
        expected = ((matrix.rows, matrix.columns // 2), (matrix.rows, matrix.columns // GROUP_SIZE))
        kinds = {"U8", "F8_E8M0"}
        if (codes.shape, scales.shape) != expected or not {codes.dtype, scales.dtype} <= kinds:
            problems.append(f"{matrix.name}: other sizes or dtypes than in the result")
            continue
        places = [_rows(source, name) for name in names]
        paired.append(replace(matrix, source_codes=places[0], source_scales=places[1]))
    if problems:
        raise ReportError(source.folder, [*problems[:_SHOWN], "it is no source of this checkpoint"])
    return paired
