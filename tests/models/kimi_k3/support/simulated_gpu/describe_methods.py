# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Prints, as JSON, what MoE methods come out of vLLM without the int4 flag on simulated GPUs, and
what becomes of the flag on gfx942; with VLLM_KIMI_K3_OVERLAY=0, of stock vLLM."""

import json

import pytest
import torch

import vllm_overlay

if not vllm_overlay.activate():
    # This project's own helpers still have to be found.
    vllm_overlay.activate(amendments=False)

from tests.models.kimi_k3.support.simulated_gpu.int4_support import (
    STAND_IN,
    build_layer,
    fill,
    make_config,
    rank_of,
)
from tests.models.kimi_k3.support.simulated_gpu.simulated_gpu import (
    ARCHITECTURES,
    install_rocm_module,
    pretend,
)
from vllm import _aiter_ops
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import mxfp4
from vllm.platforms.cpu import CpuPlatform

PLAIN = (bool, int, float, str, type(None))


def describe(method: object, layer: RoutedExperts) -> dict:
    """Everything plain about a method and its layer's parameters, attributes included."""
    experts = getattr(method, "experts_cls", None)
    return {
        "type": type(method).__qualname__,
        "backend": method.mxfp4_backend.value,
        "experts": experts and experts.__qualname__,
        "fields": {k: v for k, v in sorted(vars(method).items()) if isinstance(v, PLAIN)},
        "parameters": {
            name: [list(p.shape), str(p.dtype), sorted(vars(p))]
            for name, p in layer.named_parameters()
        },
    }


def attempt(weight: str | None, tp: int = 1, quant=mxfp4.Mxfp4Config, process=False, **sizes):
    """Build a layer; what it is, or how that failed."""
    try:
        with rank_of(make_config(weight), tp=tp):
            layer = build_layer(quant=quant, **sizes)
            fill(layer)
            if process:
                layer.quant_method.process_weights_after_loading(layer)
            return describe(layer.quant_method, layer)
    except Exception as error:
        # What follows lists the CPU's experts, which a GPU does not have.
        return f"{type(error).__name__}: {error}".partition(".")[0]


def main() -> None:
    pytest.MonkeyPatch().syspath_prepend(str(STAND_IN))
    _aiter_ops.IS_AITER_FOUND = True
    _aiter_ops.rocm_aiter_ops._AITER_ENABLED = True
    torch.accelerator.empty_cache = lambda: None
    found = {}
    for architecture in (*ARCHITECTURES, "cuda"):
        if architecture in ARCHITECTURES:
            install_rocm_module(architecture)
        pretend(architecture, CpuPlatform)
        for tp in (1, 8):
            for activation in ("situ", "silu"):
                sizes = {"tp": tp, "activation": activation, "inner": 3072}
                found[f"{architecture} {activation} tp{tp}"] = attempt(None, **sizes)
            found[f"{architecture} gpt-oss tp{tp}"] = attempt(
                None, tp=tp, activation="silu", quant=mxfp4.GptOssMxfp4Config
            )
    install_rocm_module("gfx942")
    pretend("gfx942", CpuPlatform)
    flagged = attempt("int4_per_group_32", process=True)
    print(json.dumps({"without": found, "flagged": flagged}))


if __name__ == "__main__":
    main()
