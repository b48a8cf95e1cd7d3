# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The fixture of the int4 tests."""

from tests.models.kimi_k3.support.simulated_gpu.int4_support import on_gpu  # noqa: F401
