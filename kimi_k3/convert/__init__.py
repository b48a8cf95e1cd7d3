# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""MXFP4 checkpoints rewritten once, offline, as compressed-tensors int4 checkpoints.

`source` reads and judges headers, `quantization` rewrites config.json, `layout` says what a result
shard holds, `shard` writes one, `run` drives it all, and `manifest` is the record that stays, read
by `fields`. None of them imports torch before a shard is converted, unless a GPU or compiled code
is insisted on, and none imports the engine.
"""

from kimi_k3.convert.manifest import MANIFEST_NAME, Manifest
from kimi_k3.convert.options import ConversionFailed, ConvertOptions
from kimi_k3.convert.run import convert_checkpoint

__all__ = [
    "MANIFEST_NAME",
    "ConversionFailed",
    "ConvertOptions",
    "Manifest",
    "convert_checkpoint",
]
