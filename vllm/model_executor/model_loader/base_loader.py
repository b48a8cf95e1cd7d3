# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The account of a load begins when its model is created, and knows the layers by name.

Ledger
    What: `BaseModelLoader.create_model` begins an account and names the model's layers;
        `finalize_layerwise_processing` is the one that ends it.
    Why: layers are wrapped while the model is being built, before any of them has a name.
    How: wrap one method in place, and rebind the name that this module imported, which is stale
        when `layerwise` was imported before the overlay was activated.
    Upstream: https://github.com/vllm-project/vllm/pull/40309 (warnings by class name); to file:
        [Feature] Layerwise loading: report held sources by layer name.
    Remove when: the amendment of `reload.layerwise` is removed.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm.model_executor.model_loader.reload import layerwise
from vllm_overlay import require, stand_down

OVERLAY_OPTIONAL = True

if not getattr(layerwise, "OVERLAY_OPTIONAL", False):
    stand_down("layerwise loading keeps no account", expected=True)

require(
    f"{__name__}:BaseModelLoader.create_model",
    parameters=("self", "vllm_config", "model_config", "prefix"),
)
require(f"{__name__}:finalize_layerwise_processing", parameters=("model", "model_config"))
require("vllm.config:ModelConfig.architectures")

finalize_layerwise_processing = require(f"{layerwise.__name__}:finalize_layerwise_processing")


@patch_function_wrapper(__name__, "BaseModelLoader.create_model")
def _begin_account(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from vllm.model_executor.model_loader.reload.accounting import create_model

    return create_model(wrapped, *args, **kwargs)
