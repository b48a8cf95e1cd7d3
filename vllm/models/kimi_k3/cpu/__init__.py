# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What Triton does for Kimi-K3 on a GPU, in torch, for vLLM's CPU platform.

The operations here are plain functions of tensors: they import torch and nothing of the engine.
Amendments beside upstream's Triton modules bind them to upstream's names on the CPU platform; the
package itself never changes a vLLM module and never runs on a GPU path.
"""
