# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Every test sees vLLM with the overlay in place, as vLLM's own plugins would have it."""

import signal

import vllm_overlay

vllm_overlay.activate()

# A shell lets its background jobs ignore Ctrl-C, and their children, too. Some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
