# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a load of Kimi-K3 needs: planned from config.json, or rehearsed on the meta device.

`ranks`, `components` and `memory_plan` import neither torch nor the engine; `rank_model`, `stream`
and `rehearse` build the real model classes and run the real loaders. No weight is read.
"""
