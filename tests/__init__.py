# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The tests. A package, so that they and the processes that they start share their helpers."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
