# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The way to the support modules of the int4 tests, and their fixture."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support" / "simulated_gpu"))

from int4_support import on_gpu  # noqa: F401
