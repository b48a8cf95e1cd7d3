# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One line at the end of a load: what the conversion to int4 took and, if asked for, what it cost.

It knows when a load ends because every layer that was built for conversion has been converted, so
it needs no hook in the loader, and says so again after a complete reload. The error of a sample
and the peak of memory are measured with `MEASURE_VARIABLE` only.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mxfp4_int4 import ConversionStats
from vllm.logger import init_logger

# `init_logger` names loggers after modules; this one is in the tree of vLLM's own.
logger = init_logger(__name__)

# A folder for records of a load; empty and unset mean that nobody wants to know.
MEASURE_VARIABLE = "VLLM_KIMI_K3_LOAD_ACCOUNT"


def measures() -> bool:
    """Tell whether the user asked for figures that cost time or reset process-wide counters."""
    return bool(os.environ.get(MEASURE_VARIABLE))


@dataclass
class LayerRecord:
    """One converted layer.

    Attributes:
        experts: On this rank.
        seconds: For both projections, the sample included.
        source_bytes: Of codes and scales.
        peak_extra_bytes: Most memory held beyond what was there before, the new scales included;
            None where it was not measured.
        stats: Of the sampled expert.
    """

    experts: int = 0
    seconds: float = 0.0
    source_bytes: int = 0
    peak_extra_bytes: int | None = None
    stats: ConversionStats = field(default_factory=ConversionStats)


@dataclass(eq=False)
class ConversionLog:
    """The layers of one model on one rank, from construction to the end of each load.

    Attributes:
        model_config: Kept, so that its id stays its own.
        scale_rule: By which all layers are converted; None where the checkpoint holds int4.
        awaited: Layers that were constructed and have never been converted.
        loads: The layers of each first load. A draft model, which is loaded after the target and
            under its configuration, is a load of its own.
        records: Of layers that no line has told of.
    """

    model_config: object
    scale_rule: str | None
    awaited: int = 0
    loads: list[frozenset[str]] = field(default_factory=list)
    records: dict[str, LayerRecord] = field(default_factory=dict)

    def record(self, layer_name: str, record: LayerRecord) -> None:
        """Note a converted layer; after the last one of a load, or of its repetition, log a line.

        Args:
            layer_name: As in the model.
            record: Replaces an earlier one that no line has told of.
        """
        self.records[layer_name] = record
        fresh = self.records.keys() - frozenset().union(*self.loads)
        if layer_name in fresh:
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
        rate = sum(record.source_bytes for record in records) / max(seconds, 1e-9) / 1e9
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        line = (
            f"int4 experts, rank {rank}: {len(records)} layers with "
            f"{sum(record.experts for record in records)} experts "
        )
        if self.scale_rule is None:
            line += f"laid out as the checkpoint holds them in {seconds:.2f} s ({rate:.2f} GB/s), "
            line += "nothing converted"
        else:
            line += f"converted in {seconds:.2f} s ({rate:.2f} GB/s of MXFP4), "
            line += f"scale rule {self.scale_rule}"
        return line + self._measured(records)

    def _measured(self, records: list[LayerRecord]) -> str:
        peaks = [r.peak_extra_bytes for r in records if r.peak_extra_bytes is not None]
        text = f"; peak extra memory {max(peaks) / 2**20:.1f} MiB" if peaks else ""
        stats = ConversionStats().merge(*(record.stats for record in records))
        if not stats.groups:
            return text
        # Groups of zeros are exact in any form; padding is nothing else.
        filled = max(1, stats.groups - stats.zero_groups)
        exact = (stats.exact_groups - stats.zero_groups) / filled
        return (
            f"; relative squared error {stats.relative_squared_error:.4%}, {exact:.1%} of groups "
            f"exact (one expert a layer measured, {filled} groups){text}"
            f"{', new scales included' if peaks else ''}"
        )


_logs: weakref.WeakValueDictionary[int, ConversionLog] = weakref.WeakValueDictionary()


def log_of(model_config: object, scale_rule: str | None) -> ConversionLog:
    """Return the log of a model, which lives as long as one of its layers refers to it."""
    log = _logs.get(id(model_config))
    if log is None:
        log = _logs[id(model_config)] = ConversionLog(model_config, scale_rule)
    return log


@contextmanager
def peak_memory(device: torch.device, record: LayerRecord) -> Iterator[None]:
    """Note the most memory held within the context beyond what was held at its start.

    On a GPU it is the allocator's count. On a CPU it is the resident memory of the process, whose
    peak Linux can be told to forget; other threads' memory is counted with it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        torch.cuda.synchronize(device)
        record.peak_extra_bytes = max(0, torch.cuda.max_memory_allocated(device) - before)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        yield  # Not Linux: nothing is claimed.
        return
    resident = _resident("VmRSS")
    yield
    record.peak_extra_bytes = max(0, _resident("VmHWM") - resident)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
