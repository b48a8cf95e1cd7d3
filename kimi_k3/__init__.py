# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The `kimi-k3` command line: parses and prints; the work is in functions elsewhere."""
