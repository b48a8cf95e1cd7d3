# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Every test sees vLLM with the overlay in place, as vLLM's own plugins would have it."""

import signal

import vllm_overlay

vllm_overlay.activate()

# A shell lets its background jobs ignore Ctrl-C, and nohup the end of a terminal; their children do
# so, too. Some tests send these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
