# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 experts on the CPU platform.

Ledger
    What: `Mxfp4Config.get_supported_act_dtypes` also lists float32 and float16 on the CPU platform.
    Why: upstream lists bfloat16 alone, so a CPU without fast bfloat16 and every exact comparison in
        float32 are refused, although the torch experts compute in any of them.
    How: replace one class method in place.
    Upstream: none yet.
    Remove when: upstream's method lists float32 on the CPU platform.
"""

import torch

from vllm.platforms import current_platform
from vllm_overlay import require, stand_down

if not current_platform.is_cpu():
    stand_down("the platform is not the CPU")

_config = require(f"{__name__}:Mxfp4Config")
require(f"{__name__}:Mxfp4Config.get_supported_act_dtypes", parameters=())
_upstream = _config.get_supported_act_dtypes.__func__
_CPU_DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def _get_supported_act_dtypes(cls) -> list[torch.dtype]:
    """Activation dtypes of the torch experts; other checkpoint formats keep upstream's list."""
    return list(_CPU_DTYPES) if cls is _config else _upstream(cls)


_config.get_supported_act_dtypes = classmethod(_get_supported_act_dtypes)
