# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A stand-in for AMD's AITER, for tests on a CPU. It is not AITER and shares no code with it.

It imitates only what vLLM asks of AITER for int4 experts, as it is documented: the entry points by
name, the layouts, and what they compute, with this project's own reference underneath. Nothing here
says anything about AITER's speed, its tiles or its rounding on a GPU.

The environment variable AITER_STAND_IN makes it one of the builds that are out there: "new" (the
default), "without-act" (packed int4 that computes SiLU), "without-entry" (no such kernels),
"without-situ" (no Situv2 activation).
"""

import os
from enum import IntEnum

__version__ = "0.0.stand-in"
BUILD = os.environ.get("AITER_STAND_IN", "new")


class QuantType(IntEnum):
    """Numbers that vLLM passes in place of AITER's own type."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


_ACTIVATIONS = {"No": -1, "Silu": 0, "Gelu": 1, "Swiglu": 2, "Situv2": 3}
if BUILD == "without-situ":
    del _ACTIVATIONS["Situv2"]
ActivationType = IntEnum("ActivationType", _ACTIVATIONS)
