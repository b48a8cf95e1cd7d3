# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One line at the end of a load: what the conversion to int4 took and what it cost.

Counts and measures. It knows when a load ends because every layer that was built for conversion has
been converted, so it needs no hook in the loader, and says so again after a complete reload.
"""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mxfp4_int4 import ConversionStats
from vllm.logger import init_logger

# `init_logger` names loggers after modules; this one is in the tree of vLLM's own.
logger = init_logger(__name__)


@dataclass(frozen=True)
class LayerRecord:
    """One converted layer.

    Attributes:
        experts: on this rank.
        seconds: for both projections, the sample included.
        source_bytes: of MXFP4 codes and scales.
        peak_extra_bytes: most memory held beyond what was there before, the new scales included;
            None where it cannot be told.
        stats: of the sampled expert.
    """

    experts: int
    seconds: float
    source_bytes: int
    peak_extra_bytes: int | None
    stats: ConversionStats


@dataclass(eq=False)
class LoadReport:
    """The layers of one model on one rank, from construction to the end of each load.

    Attributes:
        model_config: kept, so that its id stays its own.
        scale_rule: by which all layers are converted; None where the checkpoint holds int4.
        awaited: layers that were constructed and have never been converted.
        loads: the layers of each first load. A draft model, which is loaded after the target and
            under its configuration, is a load of its own.
        records: of layers that no line has told of.
    """

    model_config: object
    scale_rule: str | None
    awaited: int = 0
    loads: list[frozenset[str]] = field(default_factory=list)
    records: dict[str, LayerRecord] = field(default_factory=dict)

    def record(self, layer_name: str, record: LayerRecord) -> None:
        """Note a converted layer; after the last one of a load, or of its repetition, log a line.

        Args:
            layer_name: as in the model.
            record: replaces an earlier one that no line has told of.
        """
        known = frozenset().union(*self.loads)
        self.records[layer_name] = record
        if layer_name not in known:
            fresh = self.records.keys() - known
            if len(fresh) < self.awaited:
                return
            self.loads.append(frozenset(fresh))
            self.awaited = 0
        load = next(names for names in self.loads if layer_name in names)
        if load <= self.records.keys():
            logger.info("%s", self.summary([self.records.pop(name) for name in load]))

    def summary(self, records: list[LayerRecord]) -> str:
        """Return the line about these layers."""
        seconds = sum(record.seconds for record in records)
        volume = sum(record.source_bytes for record in records)
        peaks = [r.peak_extra_bytes for r in records if r.peak_extra_bytes is not None]
        peak = f"{max(peaks) / 2**20:.1f} MiB" if peaks else "not measured here"
        what = (
            f"int4 experts, rank {_rank()}: {len(records)} layers with "
            f"{sum(record.experts for record in records)} experts"
        )
        rate = f"{volume / max(seconds, 1e-9) / 1e9:.2f} GB/s"
        if self.scale_rule is None:
            return (
                f"{what} laid out as the checkpoint holds them in {seconds:.2f} s ({rate}), "
                f"nothing converted; peak extra memory {peak}"
            )
        stats = ConversionStats().merge(*(record.stats for record in records))
        # Groups of zeros are exact in any form; padding is nothing else.
        filled = max(1, stats.groups - stats.zero_groups)
        exact = (stats.exact_groups - stats.zero_groups) / filled
        return (
            f"{what} converted in {seconds:.2f} s ({rate} of MXFP4), scale rule "
            f"{self.scale_rule}; relative squared error {stats.relative_squared_error:.4%}, "
            f"{exact:.1%} of groups exact (one expert a layer measured, {filled} groups); peak "
            f"extra memory {peak}, new scales included"
        )


_reports: weakref.WeakValueDictionary[int, LoadReport] = weakref.WeakValueDictionary()


def report_for(model_config: object, scale_rule: str | None) -> LoadReport:
    """Return the report of a model, which lives as long as one of its layers refers to it."""
    report = _reports.get(id(model_config))
    if report is None:
        report = _reports[id(model_config)] = LoadReport(model_config, scale_rule)
    return report


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class PeakMemory(AbstractContextManager):
    """The most memory held within the context beyond what was held at its start.

    On a GPU it is the allocator's count. On a CPU it is the resident memory of the process, whose
    peak Linux can be told to forget; other threads' memory is counted with it.

    Args:
        device: where to measure.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extra_bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif self.device.type == "cpu":
            self._before = _forget_peak()
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _resident("VmHWM")
        self.extra_bytes = max(0, peak - self._before)


def _forget_peak() -> int | None:
    """Reset the process's peak of resident memory; return what is resident, None if unknown."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")
    except OSError:
        return None


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
