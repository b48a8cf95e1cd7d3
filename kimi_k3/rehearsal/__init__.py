# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a load of Kimi-K3 needs: planned from config.json, or rehearsed on the meta device.

`components` and `planned` import neither torch nor the engine; `layout`, `stream` and `run` build
the real model classes and run the real loaders. No weight byte is read or allocated anywhere here.
"""
