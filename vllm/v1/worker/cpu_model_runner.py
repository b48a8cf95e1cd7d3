# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Fresh cache blocks on a CPU are zeroed where they are, not where another request's are.

Ledger
    What: `CPUModelRunner._zero_block_ids` takes the manager's block ids for what they are.
    Why: where the attention kernel works on pages smaller than a block (MLA on a CPU: 16 of 128 or
        more tokens), a layer's cache is indexed by kernel page, but upstream indexes it by block
        id. It zeroes pages of other, running requests, whose answers silently change, and leaves
        the fresh block as it was.
    How: wrap the method and expand every block id to the ids of its pages.
    Upstream: none found; to file: [Bug][CPU] fresh KV blocks are zeroed by block id where the cache
        is indexed by kernel page. Zeroing is from https://github.com/vllm-project/vllm/pull/35219;
        0.34 has a zeroer of its own for CPUs.
    Remove when: with two pages a block, `_zero_block_ids([1])` zeroes pages 2 and 3 of upstream.
"""

from typing import Any

from wrapt import patch_function_wrapper

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_overlay import require

require(
    f"{__name__}:CPUModelRunner._zero_block_ids",
    parameters=("self", "block_ids"),
    uses=("kv_cache_config", "compilation_config", "static_forward_context", "kv_cache"),
)
require("vllm.v1.kv_cache_interface:KVCacheConfig")


def _pages_per_block(runner: Any) -> int:
    """How many kernel pages one block of the manager has in the attention caches of ``runner``."""
    context = runner.compilation_config.static_forward_context
    found = {
        context[name].kv_cache.shape[0] // runner.kv_cache_config.num_blocks
        for group in runner.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, FullAttentionSpec)
        for name in group.layer_names
        if hasattr(getattr(context.get(name), "kv_cache", None), "shape")
    }
    if len(found) > 1:
        raise NotImplementedError(
            f"attention layers split a cache block into {sorted(found)} pages; zeroing fresh "
            "blocks on a CPU needs one number for all of them"
        )
    return found.pop() if found else 1


@patch_function_wrapper(__name__, "CPUModelRunner._zero_block_ids")
def _zero_pages(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    (block_ids,) = args or kwargs.values()
    pages = _pages_per_block(instance)
    return wrapped([block * pages + page for block in block_ids for page in range(pages)])
