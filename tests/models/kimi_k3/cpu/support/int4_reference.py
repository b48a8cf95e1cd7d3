# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The reference model with experts as the int4 conversion leaves them, and how answers are held
against it. Codes times scales of `convert_experts`; nothing of the engine or its experts."""

import re
from pathlib import Path

import torch

from mxfp4_int4 import convert_experts, dequantize
from tests.models.kimi_k3.cpu.support.k3_engine import Answer
from tests.models.kimi_k3.cpu.support.k3_reference import Reference, decode_mxfp4

# The bar of the project for float32: the engine and the reference add in different orders.
LOGPROB_TOLERANCE = 1e-4


class Int4Reference(Reference):
    """A checkpoint's text model with int4 experts.

    Args:
        folder: holds config.json and the shards.
        scale_rule: of the conversion.
        spared: layers whose experts stay MXFP4.

    """

    def __init__(self, folder: Path, scale_rule: str = "mse", spared: tuple[int, ...] = ()) -> None:
        super().__init__(folder)
        self.scale_rule = scale_rule
        self.spared = spared

    def expert_weight(self, name: str) -> torch.Tensor:
        """One projection of one expert."""
        packed, scale = (self.tensors[f"{name}.weight_{part}"] for part in ("packed", "scale"))
        if int(re.search(r"layers\.(\d+)\.", name)[1]) in self.spared:
            return decode_mxfp4(packed, scale)
        shape = (1, packed.shape[0], 2 * packed.shape[1])
        converted = convert_experts(
            packed[None], scale[None], layout="plain", scale_rule=self.scale_rule
        )
        return dequantize(converted, "plain", shape)[0]


def agreement(
    reference: Reference, prompt: list[int], answer: Answer
) -> tuple[int, int, float, float]:
    """Tokens that are the reference's own choice, tokens in all, the largest and the mean
    difference of their logprobs."""
    logits = reference.logits(prompt + answer.tokens[:-1])[len(prompt) - 1 :]
    logprobs = logits.log_softmax(dim=-1)
    same = sum(a == b for a, b in zip(answer.tokens, logprobs.argmax(-1).tolist(), strict=True))
    chosen = logprobs.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
    difference = (chosen - torch.tensor(answer.logprobs)).abs()
    return same, len(answer.tokens), difference.max().item(), difference.mean().item()


def hold(reference: Reference, prompts: list[list[int]], answers: list[Answer]) -> None:
    """Every token is the reference's choice, every logprob within the bar."""
    for prompt, answer in zip(prompts, answers, strict=True):
        same, count, largest, _ = agreement(reference, prompt, answer)
        assert (same, count) == (len(answer.tokens), len(answer.tokens))
        assert largest <= LOGPROB_TOLERANCE, f"prompt of {len(prompt)} tokens"
