# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How gate and up lie in w13."""

from enum import Enum


class GateMode(Enum):
    """Gate rows before up rows, or alternating."""

    SEPARATED = "separated"
    INTERLEAVE = "interleave"
