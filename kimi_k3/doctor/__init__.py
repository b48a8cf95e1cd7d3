# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What stands between a machine and serving Kimi-K3: `kimi-k3 doctor`'s probes and judgement.

`machine` and `checkpoint` look; `environment`, `experts` and `memory` judge what was seen and
import neither torch nor the engine; `diagnose` puts it together. Nothing is changed or downloaded.
"""
