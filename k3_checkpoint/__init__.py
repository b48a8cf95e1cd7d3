# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a Kimi-K3 checkpoint is, and checkpoints with random weights to try things on.

`Checkpoint.open` reads config.json, index and headers of a folder or of a model in the local hub
cache, and lists everything that is wrong with them; `check` also compares them with a model's
sizes. `formats` knows how weights are stored. `spec` says what a model looks like, `tensors` names
every tensor of it, `values` draws them, `shards`, `tokenizer` and `write` write files.

Nothing here imports the engine, nothing downloads, and only drawing and writing import torch.
"""

from k3_checkpoint.checkpoint import Checkpoint
from k3_checkpoint.problems import Kind, Problem

__all__ = ["Checkpoint", "Kind", "Problem"]
