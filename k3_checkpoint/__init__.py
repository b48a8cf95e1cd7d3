# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3 checkpoints with random weights: their shape, their values, their files.

`spec` says what a model looks like, `tensors` names every tensor of its checkpoint, `values` draws
them, `shards` and `tokenizer` write files, and `check` compares a folder with a spec. Nothing here
imports the engine, and nothing downloads.
"""
