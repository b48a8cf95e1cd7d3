# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Lays this project's ``vllm/`` tree over the installed vLLM, in memory only.

New modules become importable at their upstream paths; amendments run at the end of the upstream
module that they amend. No file of the installed vLLM is ever written, and neither torch nor vLLM is
imported here. What the tree is about is none of this package's business.
"""

from vllm_overlay.activation import (
    activate,
    general_plugin,
    is_active,
    is_switched_off,
    outcomes,
    platform_plugin,
)
from vllm_overlay.compat import SWITCH, OverlayMismatchError, require, stand_down
from vllm_overlay.outcome import Outcome, State

__all__ = [
    "SWITCH",
    "Outcome",
    "OverlayMismatchError",
    "State",
    "activate",
    "general_plugin",
    "is_active",
    "is_switched_off",
    "outcomes",
    "platform_plugin",
    "require",
    "stand_down",
]
