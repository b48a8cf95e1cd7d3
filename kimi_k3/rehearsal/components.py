# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The memory of one rank by component, as one record: what tables, JSON and refusals are made of.

Sorts parameter names and adds up bytes; it does not know where they come from.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

GIB = 2**30
# Experts that the int4 conversion works on at a time.
CHUNK_EXPERTS = 8

# Memory of one GPU in GiB. AMD's data sheets give its HBM in binary gigabytes; NVIDIA's driver
# reports 143,771 MiB for the H200.
GPUS: dict[str, float] = {
    "MI300X": 192.0,
    "MI308X": 192.0,
    "MI325X": 256.0,
    "MI355X": 288.0,
    "H200": 143771 / 1024,
}


def gpu_memory(name: str) -> float:
    """Return a GPU's memory in GiB, by its name or as the number itself.

    Raises:
        ValueError: Neither a known name nor a positive number.
    """
    if name.upper() in GPUS:
        return GPUS[name.upper()]
    try:
        gib = float(name)
    except ValueError:
        gib = 0
    if not 0 < gib < float("inf"):
        raise ValueError(
            f"GPU: expected one of {', '.join(GPUS)} or a number of GiB, found {name!r}"
        )
    return gib


EXPERTS, SCALES = "routed experts", "routed experts' scales"
KDA, MLA, REST = "KDA attention", "MLA attention", "norms and residual mixing"
# Component -> parts of parameter names that belong to it; the first match decides.
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (SCALES, ("routed_experts.w13_weight_scale", "routed_experts.w2_weight_scale")),
    (EXPERTS, ("routed_experts.",)),
    ("latent projections", ("routed_expert_down_proj", "routed_expert_up_proj")),
    ("shared experts", ("shared_experts.",)),
    ("router", (".gate.weight", ".gate.e_score_correction_bias")),
    ("embeddings", ("embed_tokens.",)),
    ("output head", ("lm_head.",)),
    ("dense MLP", (".mlp.",)),
)
ORDER = (EXPERTS, SCALES, KDA, MLA, *(name for name, _ in _RULES[2:]), REST)


def component_of(name: str, kda_layers: frozenset[int]) -> str:
    """Return the component that a parameter of the model belongs to.

    Args:
        name: In the model, such as ``model.layers.3.self_attn.o_proj.weight``.
        kda_layers: Indices (from 0) of the layers with KDA; the other layers have MLA.
    """
    for component, parts in _RULES:
        if any(part in name for part in parts):
            return component
    if ".self_attn." in name:
        layer = int(name.split(".layers.")[1].split(".")[0])
        return KDA if layer in kda_layers else MLA
    return REST


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank holds.

    Attributes:
        components: Component -> bytes of its parameters after loading, in the order of `ORDER`.
        rounding: Further bytes if the experts' intermediate size were rounded up to vLLM's general
            alignment for ROCm instead of the one of AITER's SiTU kernel.
        int4_scales: Further bytes of the experts' scales when they are converted to int4, whose
            scales are bf16 instead of e8m0; 0 where the checkpoint holds int4.
        int4_transient: Extra bytes while the experts of one layer are being converted.
        absorbed: Bytes of the forms of `kv_b_proj` that MLA layers derive after loading.
        vision: Bytes of the vision tower, which every rank holds, if the checkpoint has one.
    """

    components: dict[str, int]
    rounding: int
    int4_scales: int
    int4_transient: int
    absorbed: int
    vision: int

    @property
    def resident(self) -> int:
        """Bytes of all text parameters after loading."""
        return sum(self.components.values())

    @property
    def worker(self) -> int:
        """Bytes that are known of a running worker's weights: text, absorbed forms and vision."""
        return self.resident + self.absorbed + self.vision

    def free(self, gpu_gib: float, utilization: float) -> float:
        """Return the GiB left for the KV cache and activations on a GPU.

        Args:
            gpu_gib: The GPU's memory.
            utilization: Share of it that vLLM may use (``--gpu-memory-utilization``).
        """
        return gpu_gib * utilization - self.worker / GIB

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, the sums included, for JSON."""
        return {**asdict(self), "resident": self.resident, "worker": self.worker}


def summed(sizes: Iterable[tuple[str, int]], kda_layers: frozenset[int]) -> dict[str, int]:
    """Return component -> bytes, 0 for those without any, from (parameter name, bytes) pairs."""
    totals = dict.fromkeys(ORDER, 0)
    for name, nbytes in sizes:
        totals[component_of(name, kda_layers)] += nbytes
    return totals
