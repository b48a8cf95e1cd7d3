# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a load came to: plain records, their line for the log and their JSON form."""

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

GIB = 2**30
# Environment variable: folder for one JSON record per load and rank.
RECORD_VARIABLE = "VLLM_KIMI_K3_LOAD_ACCOUNT"
# Layers that a message lists at most.
_SHOWN = 10


@dataclass(frozen=True)
class Missing:
    """A parameter of which not every element has arrived.

    Attributes:
        param: Its name in the layer.
        arrived: Elements that arrived.
        expected: Elements that layerwise loading waits for.
        row: Elements in a row (an entry of dimension 0); 1 if whole rows do not tell the state.
    """

    param: str
    arrived: int
    expected: int
    row: int

    @property
    def counts(self) -> str:
        """Arrived and expected, in rows where possible."""
        unit = "rows" if self.row > 1 else "elements"
        return f"{self.arrived // self.row} of {self.expected // self.row} {unit}"

    def __str__(self) -> str:
        return f"{self.param}: {self.counts}"


@dataclass(frozen=True)
class Delay:
    """A layer that holds sources because it is not complete.

    Attributes:
        layer: Its name.
        nbytes: Bytes of the sources that it holds.
        missing: What it waits for.
    """

    layer: str
    nbytes: int
    missing: tuple[Missing, ...]

    def __str__(self) -> str:
        """Say what the whole checkpoint lacked."""
        parts = []
        for missing in self.missing:
            lacking = (missing.expected - missing.arrived) // missing.row
            unit = "row" if missing.row > 1 else "element"
            parts.append(
                f"{missing.param}: {missing.counts} arrived; "
                f"{lacking} {unit}{'' if lacking == 1 else 's'} in no shard"
            )
        return f"{self.layer}: {', '.join(parts)} ({self.nbytes / GIB:.4f} GiB held)"


def table(holders: list[Delay]) -> str:
    """Return the layers that hold the most, a line each, and what they wait for."""
    holders = sorted(holders, key=lambda holder: -holder.nbytes)
    shown, rest = holders[:_SHOWN], holders[_SHOWN:]
    width = max((len(holder.layer) for holder in shown), default=0)
    lines = []
    for holder in shown:
        waits_for = ", ".join(str(m) for m in holder.missing) or "its last shard"
        lines.append(f"  {holder.nbytes / GIB:8.3f} GiB  {holder.layer:<{width}}  {waits_for}")
    if rest:
        nbytes = sum(holder.nbytes for holder in rest)
        lines.append(f"  {nbytes / GIB:8.3f} GiB  in {len(rest)} more layers")
    return "\n".join(lines)


def delayed(delays: list[Delay]) -> str:
    """Return the warning about layers that the whole checkpoint did not complete."""
    lines = [f"{len(delays)} layers were not completed by the whole checkpoint:"]
    lines += [f"  {delay}" for delay in delays[:_SHOWN]]
    if len(delays) > _SHOWN:
        lines.append(f"  and {len(delays) - _SHOWN} more")
    return "\n".join(lines)


@dataclass(frozen=True)
class Peak:
    """The most that was held.

    Attributes:
        nbytes: Bytes.
        owner: Layer and parameter whose source made it the most.
        source: How many loader calls had come before.
        seconds: Since the load began.
    """

    nbytes: int = 0
    owner: str = ""
    source: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Point:
    """What was held when a source had just come or a layer was complete.

    Attributes:
        seconds: Since the load began.
        event: ``source``, ``complete``, or ``finalize`` for a completion at the end of the load.
        layer: Whose.
        device, host: Bytes held.
    """

    seconds: float
    event: str
    layer: str
    device: int
    host: int


@dataclass(frozen=True)
class LoadSummary:
    """One load on one rank.

    Attributes:
        rank: Of this process; 0 without a distributed layout.
        wrapped: Layers whose loaders buffer.
        completed_early: Layers that completed while weights were coming.
        delays: Layers that the whole checkpoint did not complete.
        sources: Loader calls of wrapped layers.
        peak: The most held on the device, inside a call.
        peak_between_calls: The most held on the device after a call, bytes.
        peak_host: The most held in host memory.
        seconds: From the first layer's construction to the end of the load.
        history: What was held over time, if it was kept.
    """

    rank: int
    wrapped: int
    completed_early: int
    delays: tuple[Delay, ...]
    sources: int
    peak: Peak
    peak_between_calls: int
    peak_host: Peak
    seconds: float
    history: tuple[Point, ...]

    def line(self) -> str:
        """Return the line for the log."""
        by = f" by {self.peak.owner}" if self.peak.nbytes else ""
        return (
            f"Load account of rank {self.rank}: {self.wrapped} layers wrapped, "
            f"{self.completed_early} completed early, {len(self.delays)} delayed; "
            f"peak held {self.peak.nbytes / GIB:.4f} GiB on the device{by}, "
            f"{self.peak_host.nbytes / GIB:.4f} GiB on the host; "
            f"{self.sources} sources in {self.seconds:.1f} s"
        )

    def write(self, folder: Path) -> Path:
        """Write the record to a file of its own in `folder` and return its path."""
        file = folder / f"load-rank{self.rank}-{uuid.uuid4().hex}.json"
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return file


def requested_folder() -> Path | None:
    """Return the folder for JSON records that the environment names, made and writable, if any.

    Raises:
        ValueError: It cannot be made or written into.
    """
    name = os.environ.get(RECORD_VARIABLE)
    if not name:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{RECORD_VARIABLE}: expected a folder to write records into, found {error}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{RECORD_VARIABLE}: expected a writable folder, found {folder}")
    return folder
