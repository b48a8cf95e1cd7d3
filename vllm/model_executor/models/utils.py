# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Weights on their way into a model pass two onlookers: one notes names, one guards held sources.

Ledger
    What: `AutoWeightsLoader._load_module` notes the name of each tensor that it hands to a module's
        own `load_weights`, and checks that no tensor has overwritten one that is held.
    Why: an `IndexedMapping` can offer the right entry first only if it knows which tensor is
        being loaded; the loop that iterates over it tells nothing. And a tensor that layerwise
        loading holds is lost silently when the iterator reuses its memory for the next one.
    How: wrap one method and put a generator between the weights and the module.
    Upstream: none yet.
    Remove when: the amendments of `layers.fused_moe.routed_experts` and `reload.layerwise` are.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm.model_executor.model_loader.expert_index import note_names
from vllm_overlay import require

require(
    f"{__name__}:AutoWeightsLoader._load_module",
    parameters=("self", "base_prefix", "module", "weights"),
)


@patch_function_wrapper(__name__, "AutoWeightsLoader._load_module")
def _look_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    def load(base_prefix: str, module: Any, weights: Any) -> Any:
        # The loader calls a module's own method unless the module is the one it was made for.
        if module is not instance.module and callable(getattr(module, "load_weights", None)):
            weights = note_names(weights)
        elif not base_prefix:
            from vllm.model_executor.model_loader.reload.accounting import watch

            weights = watch(weights)
        return wrapped(base_prefix, module, weights)

    return load(*args, **kwargs)
