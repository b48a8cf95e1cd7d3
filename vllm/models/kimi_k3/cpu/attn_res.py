# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Attention residuals: a layer's input is a softmax mixture over earlier block states.

Torch form of the call that upstream's `amd/ops/attn_res.py` serves with a Triton kernel. It never
quantizes its output: no layer on the CPU platform asks for it.
"""

import torch


def attn_res(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    *,
    quant_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Mix the running sum with the states of finished blocks, then normalize.

    The sources are rows ``0 .. num_blocks - 1`` of ``blocks`` and the updated prefix. A source's
    score is its root-mean-square normalized value (weighted by ``norm_weight``) times
    ``qk_weight``; the result is the softmax-weighted mean of the sources.

    Args:
        prefix: ``[T, D]``, the running sum; ``delta`` is added to it in place.
        delta: ``[T, D]`` or None.
        blocks: ``[T, B, D]``; row ``block_write_idx`` receives the updated prefix.
        norm_weight: ``[D]``.
        qk_weight: ``[D]``.
        output_norm_weight: ``[D]``, or None for no normalization of the mixture.
        num_blocks: how many rows of ``blocks`` are sources.
        block_write_idx: the row to write, or -1.
        eps: of the scores' normalization.
        output_norm_eps: of the mixture's normalization.
        quant_dtype: must be None.

    Returns:
        ``[T, D]`` in the dtype of ``prefix``; arithmetic is float32.

    Raises:
        NotImplementedError: a quantized output was asked for.
    """
    if quant_dtype is not None:
        raise NotImplementedError(
            f"attn_res on a CPU returns {prefix.dtype}, found quant_dtype={quant_dtype}: online "
            "FP8 activation quantization needs a GPU. Serve without it."
        )
    if delta is not None:
        prefix.copy_(prefix.float() + delta.float())
    if block_write_idx >= 0:
        blocks[:, block_write_idx].copy_(prefix)
    mixed = prefix.float()
    if num_blocks:
        sources = torch.cat([blocks[:, :num_blocks].float(), mixed.unsqueeze(1)], dim=1)
        direction = norm_weight.float() * qk_weight.float()
        scores = (sources @ direction) * _inverse_rms(sources, eps).squeeze(-1)
        mixed = (scores.softmax(dim=1).unsqueeze(1) @ sources).squeeze(1)
    if output_norm_weight is not None:
        mixed = mixed * _inverse_rms(mixed, output_norm_eps) * output_norm_weight.float()
    return mixed.to(prefix.dtype)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` along the last dimension, which is kept as 1."""
    return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
