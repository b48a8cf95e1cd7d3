# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Online loading of Kimi-K3's merged KDA projection on ROCm: alignment rows are not waited for.

Ledger
    What: `_KimiGDNMergedColumnParallelLinear`, the name through which `KimiK3DeltaAttention` builds
        its merged projection, becomes `_PaddedKimiGDNMergedColumnParallelLinear`, and its
        `__init__` accepts formats without a parameter `weight`.
    Why: the projection is padded to a multiple of 16 rows with alignment rows that are in no
        checkpoint. Layerwise loading counts them, so the layer never completes, every source tensor
        stays on the GPU until the end of the load (0.66 GiB a layer, 45.5 GiB at TP8), and the
        materialized alignment rows hold whatever was in memory.
    How: a subclass of the shared projection reports the number of elements that a checkpoint holds
        (`weight_loader_numel`) and sets the alignment rows whenever a shard is loaded.
    Upstream: `models/kimi_k3/nvidia/kda.py` has a padded class, and so has this module in 0.34; to
        file: [Bug] Kimi-K3 KDA: a padded projection counts a repeated shard twice and lets a
        missing one pass.
    Remove when: upstream's module defines `_PaddedKimiGDNMergedColumnParallelLinear` itself.
"""

from typing import Any

import torch
from torch.nn import Parameter
from wrapt import patch_function_wrapper

from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
from vllm.model_executor.parameter import BasevLLMParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.models.kimi_k3.amd.kda_alignment import ShardRecord, describe
from vllm_overlay import require, stand_down

if "_PaddedKimiGDNMergedColumnParallelLinear" in globals():
    stand_down("upstream's KDA projection does not wait for its alignment rows")

require(
    f"{__name__}:KimiK3DeltaAttention.__init__",
    parameters=("self", "config", "vllm_config", "prefix"),
    uses=("_KimiGDNMergedColumnParallelLinear", "in_proj_padding"),
)
_SHARED = f"{kimi_gdn_linear_attn.__name__}:_KimiGDNMergedColumnParallelLinear"
require(
    f"{_SHARED}.__init__",
    parameters=("self", "input_size", "output_sizes", "replicated_shard_id", "tp_size"),
)
require(
    f"{_SHARED}.weight_loader", parameters=("self", "param", "loaded_weight", "loaded_shard_id")
)
require(
    f"{_SHARED}.weight_loader_v2", parameters=("self", "param", "loaded_weight", "loaded_shard_id")
)
require(
    "vllm.model_executor.model_loader.reload.utils:get_tensor_load_numel", parameters=("tensor",)
)
require(
    "vllm.model_executor.model_loader.reload.layerwise:make_online_process_loader",
    parameters=("layer", "param_name"),
)

# Checkpoint tensors in the order of their shard ids; `KimiLinearModel.load_weights` assigns these.
_SHARD_NAMES = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")


class _PaddedKimiGDNMergedColumnParallelLinear(
    kimi_gdn_linear_attn._KimiGDNMergedColumnParallelLinear
):
    """Merged KDA projection whose last output partition may be alignment rows.

    Args:
        input_size: Hidden size.
        output_sizes: Rows of q, k, v, g, f_a and beta over all ranks, f_a's those of one rank; a
            seventh entry, if there is one, is ``alignment rows * tp_size``.
        replicated_shard_id: Index of f_a, which every rank holds whole.
        tp_size: Tensor-parallel size.
        **kwargs: As for `MergedColumnParallelLinear`.

    Raises:
        ValueError: The number of output sizes is neither six nor seven.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        replicated_shard_id: int,
        tp_size: int,
        **kwargs: Any,
    ) -> None:
        checkpoint_shards = len(_SHARD_NAMES)
        if len(output_sizes) not in (checkpoint_shards, checkpoint_shards + 1):
            raise ValueError(
                f"{kwargs.get('prefix', '')}: expected {checkpoint_shards} output sizes "
                f"({', '.join(_SHARD_NAMES)}) and at most one for alignment, found {output_sizes}"
            )
        super().__init__(input_size, output_sizes, replicated_shard_id, tp_size, **kwargs)
        local_sizes = [size // tp_size for size in self.output_sizes]
        padding = sum(local_sizes[checkpoint_shards:])
        if not padding:
            return
        for name, param in self.named_parameters(recurse=False):
            record = describe(
                self, name, local_sizes=local_sizes[:checkpoint_shards], padding=padding
            )
            set_weight_attrs(
                param,
                {
                    "shard_record": record,
                    "weight_loader_numel": record.loadable_numel(param),
                },
            )
            record.fill_alignment(param)
        if "weight" not in self._parameters:
            # `KimiK3DeltaAttention` zeroes the last rows of `weight`, whatever the format.
            self.weight = torch.empty(0)

    def weight_loader(
        self, param: Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None
    ) -> None:
        """Load one shard, or count it while the parameter waits on the meta device."""
        if self._accept(param, loaded_shard_id):
            super().weight_loader(param, loaded_weight, loaded_shard_id)
            self._fill_alignment(param)

    def weight_loader_v2(
        self, param: BasevLLMParameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None
    ) -> None:
        """As `weight_loader`, for vLLM's parameter classes."""
        if self._accept(param, loaded_shard_id):
            super().weight_loader_v2(param, loaded_weight, loaded_shard_id)
            self._fill_alignment(param)

    def _accept(self, param: Parameter, shard_id: object) -> bool:
        """Keep the parameter's record; False for a shard that must not be counted again.

        Raises:
            ValueError: The load of the buffered shards begins and one of them has not arrived.
        """
        record: ShardRecord | None = getattr(param, "shard_record", None)
        if record is None or not isinstance(shard_id, int):
            return True
        # Layerwise loading runs each loader twice: on arrival, while the parameter's loader is
        # wrapped, to count the elements that it copies; and once more to fill the parameter.
        if hasattr(getattr(param, "weight_loader", None), "__wrapped__"):
            return record.note(shard_id)
        missing = record.take_missing()
        if missing:
            name = next(name for name, value in self._parameters.items() if value is param)
            lacking = ", ".join(f"{_SHARD_NAMES[shard]} (shard {shard})" for shard in missing)
            raise ValueError(
                f"{self.prefix}.{name}: the weights ended without {lacking}. Expected one tensor "
                f"each for {', '.join(_SHARD_NAMES)}; the layer cannot be used without all of "
                "them. Check that the checkpoint, or the weight update, is complete."
            )
        return True

    def _fill_alignment(self, param: Parameter) -> None:
        record: ShardRecord | None = getattr(param, "shard_record", None)
        if record is not None:
            record.fill_alignment(param)


@patch_function_wrapper(__name__, "KimiK3DeltaAttention.__init__")
def _without_stand_in(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    vars(instance.in_proj_qkvgfab).pop("weight", None)


_KimiGDNMergedColumnParallelLinear = _PaddedKimiGDNMergedColumnParallelLinear
