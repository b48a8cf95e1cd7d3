# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 checkpoints rewritten once, offline, as compressed-tensors int4 checkpoints.

One shard's way: `conversion` plans it (`source`, `work_plan`), `pool` hands it to a
`worker`, `shard` converts it, and `destination` gives it its name. `verify` proves what is there,
`manifest` is the record that stays. None of them imports torch before a shard is converted, unless
a GPU or compiled code is insisted on, and none imports the engine.
"""

from kimi_k3.convert.conversion import convert_checkpoint
from kimi_k3.convert.manifest import MANIFEST_NAME, Manifest
from kimi_k3.convert.options import ConversionFailed, ConvertOptions

__all__ = [
    "MANIFEST_NAME",
    "ConversionFailed",
    "ConvertOptions",
    "Manifest",
    "convert_checkpoint",
]
