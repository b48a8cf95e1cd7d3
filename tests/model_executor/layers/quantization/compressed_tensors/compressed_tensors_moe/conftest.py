# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The way to the support modules of the int4 tests, and their fixture."""

import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[5] / "models" / "kimi_k3" / "support"
sys.path.insert(0, str(SUPPORT / "simulated_gpu"))

from int4_support import on_gpu  # noqa: E402, F401
