# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The expert mapping that models search for every tensor finds its entry at once.

Ledger
    What: `RoutedExperts.make_expert_params_mapping` returns the same list as an `IndexedMapping`.
    Why: models scan the mapping for each checkpoint tensor. With Kimi-K3's 896 experts that is
        2,688 entries for each of 494,592 tensors: two thirds of the Python time of a load.
    How: wrap one static method. The names of tensors come from the amendment of `models.utils`.
    Upstream: none found; to file: [Perf] Kimi-K3: O(1) expert lookup in load_weights, as in
        https://github.com/sgl-project/sglang/pull/38805.
    Remove when: `KimiLinearModel.load_weights` no longer scans the mapping.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm.model_executor.model_loader.expert_index import IndexedMapping
from vllm_overlay import require

require(
    f"{__name__}:RoutedExperts.make_expert_params_mapping",
    parameters=(
        "model",
        "ckpt_gate_proj_name",
        "ckpt_down_proj_name",
        "ckpt_up_proj_name",
        "num_experts",
        "num_redundant_experts",
        "routed_experts_prefix",
    ),
)


@patch_function_wrapper(__name__, "RoutedExperts.make_expert_params_mapping")
def _indexed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return IndexedMapping(wrapped(*args, **kwargs))
