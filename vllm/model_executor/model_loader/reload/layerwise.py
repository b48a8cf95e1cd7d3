# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Layerwise loading keeps an account: which layers wait for what, and the sources they hold.

Ledger
    What: `make_online_process_loader`, `_layerwise_process`, `initialize_layerwise_reload` and
        `finalize_layerwise_processing` report to the account of the load under way, for Kimi-K3 or
        where the environment asks for one; otherwise they are upstream's.
    Why: a layer that never completes holds its source tensors until the end of the load. Upstream
        counts elements per layer and names no layer, so a load that runs out of memory after hours
        does not say who held it, and a delayed layer is a debug line with a class name.
    How: wrap four functions that upstream looks up when it calls them. What is loaded, and when,
        stays as it is, unless the sources held exceed the budget or were overwritten.
    Upstream: https://github.com/vllm-project/vllm/pull/40309 and
        https://github.com/vllm-project/vllm/pull/49505 (warnings by class name); to file: [Feature]
        Layerwise loading: report held sources by layer name.
    Remove when: upstream reports held sources by layer name.
"""

from typing import Any

from wrapt import wrap_function_wrapper

from vllm_overlay import require

OVERLAY_OPTIONAL = True

_RELOAD = "vllm.model_executor.model_loader.reload"
require(
    f"{__name__}:_wrap_parameters_weight_loader",
    parameters=("layer",),
    uses=("make_online_process_loader",),
)
require(f"{__name__}:make_online_process_loader", parameters=("layer", "param_name"))
require(f"{__name__}:_layerwise_process", parameters=("layer", "info"))
require(f"{__name__}:initialize_layerwise_reload", parameters=("model",))
require(
    f"{__name__}:finalize_layerwise_processing",
    parameters=("model", "model_config"),
    uses=("_layerwise_process",),
)
require(f"{__name__}:get_layerwise_info", parameters=("layer",))
require(f"{_RELOAD}.types:LayerReloadingInfo.can_load")
require(f"{_RELOAD}.utils:get_layer_tensors", parameters=("layer",))
require(f"{_RELOAD}.utils:get_tensor_load_numel", parameters=("tensor",))
require(f"{_RELOAD}.meta:SKIP_LOAD_TENSORS")


def _with_account(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # Imported when it is needed: its package is still being imported when this module is amended.
    from vllm.model_executor.model_loader.reload.accounting import SURROUNDED

    return SURROUNDED[wrapped.__name__](wrapped, *args, **kwargs)


for _name in (
    "make_online_process_loader",
    "_layerwise_process",
    "initialize_layerwise_reload",
    "finalize_layerwise_processing",
):
    wrap_function_wrapper(__name__, _name, _with_account)
