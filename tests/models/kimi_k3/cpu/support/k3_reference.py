# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3's text model from its equations: no cache, no batch, one sequence, token by token.

The measure for everything that serves. It reads checkpoint files with safetensors and computes with
torch; it imports nothing of vLLM and nothing of this project, so that no mistake can be shared.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Values ``[N, K]`` of ``[N, K / 2]`` pairs of codes with ``[N, K / 32]`` e8m0 scales."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    values = torch.where(codes < 8, 1.0, -1.0) * E2M1[codes % 8]
    return values * torch.exp2(scale.double() - 127).float().repeat_interleave(32, dim=1)


class Reference:
    """A checkpoint's text model.

    Args:
        folder: holds config.json and the safetensors shards.
        decode: how an expert projection ``(packed, scale)`` becomes values; MXFP4 by default.
        dtype: of all arithmetic.

    """

    def __init__(
        self,
        folder: Path,
        decode: Callable[[Tensor, Tensor], Tensor] = decode_mxfp4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config = config.get("text_config", config)
        self.decode = decode
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - safe_open is no dict
                    self.tensors[name.removeprefix("language_model.")] = shard.get_tensor(name)

    def weight(self, name: str) -> Tensor:
        """A stored tensor in the dtype of the arithmetic."""
        return self.tensors[name].to(self.dtype)

    def logits(self, tokens: list[int]) -> Tensor:
        """Next-token logits ``[T, vocabulary]`` after every token of a sequence."""
        c = self.config
        size = c["attn_res_block_size"]
        blocks: list[Tensor] = []
        running = self.weight("model.embed_tokens.weight")[tokens]
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            mixed = self.mix(running, blocks, f"{prefix}self_attention_res")
            x = self.norm(mixed, f"{prefix}input_layernorm")
            is_kda = layer + 1 in c["linear_attn_config"]["kda_layers"]
            attention = (self.kda if is_kda else self.mla)(x, f"{prefix}self_attn.")
            if layer % size == 0:
                # A block ends here: its sum becomes a source for all later layers.
                blocks.append(running)
                running = attention
            else:
                running = running + attention
            mixed = self.mix(running, blocks, f"{prefix}mlp_res")
            x = self.norm(mixed, f"{prefix}post_attention_layernorm")
            if layer < c["first_k_dense_replace"]:
                running = running + self.mlp(x, f"{prefix}mlp.")
            else:
                running = running + self.moe(x, f"{prefix}block_sparse_moe.")
        mixed = self.mix(running, blocks, "model.output_attn_res")
        return self.norm(mixed, "model.norm") @ self.weight("lm_head.weight").T

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """Root-mean-square normalization along the last dimension."""
        eps = self.config["rms_norm_eps"] if eps is None else eps
        scale = (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        return x / scale * self.weight(f"{name}.weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A projection without bias."""
        return x @ self.weight(f"{name}.weight").T

    def mix(self, running: Tensor, blocks: list[Tensor], name: str) -> Tensor:
        """Attention residual: softmax mixture of finished blocks and the running sum."""
        sources = torch.stack([*blocks, running], dim=1)
        direction = self.weight(f"{name}_proj.weight")[0]
        scores = self.norm(sources, f"{name}_norm") @ direction
        return (scores.softmax(dim=1).unsqueeze(-1) * sources).sum(dim=1)

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        """SiTU-GLU."""
        beta = self.config["activation_situ_beta"]
        linear_beta = self.config["activation_situ_linear_beta"]
        bounded = beta * (gate / beta).tanh() * gate.sigmoid()
        return bounded * (linear_beta * (up / linear_beta).tanh())

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        """Dense gated layer, also the shared experts."""
        hidden = self.situ(self.linear(x, f"{prefix}gate_proj"), self.linear(x, f"{prefix}up_proj"))
        return self.linear(hidden, f"{prefix}down_proj")

    def expert_weight(self, name: str) -> Tensor:
        """One projection of one expert, decoded if it is stored packed."""
        if f"{name}.weight" in self.tensors:
            return self.weight(f"{name}.weight")
        packed, scale = (self.tensors[f"{name}.weight_{part}"] for part in ("packed", "scale"))
        return self.decode(packed, scale).to(self.dtype)

    def moe(self, x: Tensor, prefix: str) -> Tensor:
        """Routed experts in latent space beside the shared experts."""
        c = self.config
        scores = self.linear(x, f"{prefix}gate").sigmoid()
        chosen = (scores + self.weight(f"{prefix}gate.e_score_correction_bias")).topk(
            c["num_experts_per_token"], dim=-1
        )[1]
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True) * c["routed_scaling_factor"]
        latent = self.linear(x, f"{prefix}routed_expert_down_proj")
        routed = torch.zeros_like(latent)
        for expert in chosen.unique().tolist():
            w1, w2, w3 = (self.expert_weight(f"{prefix}experts.{expert}.w{i}") for i in (1, 2, 3))
            rows, slots = torch.where(chosen == expert)
            result = self.situ(latent[rows] @ w1.T, latent[rows] @ w3.T) @ w2.T
            routed[rows] += weights[rows, slots].unsqueeze(1) * result
        routed = self.norm(routed, f"{prefix}routed_expert_norm")
        up = self.linear(routed, f"{prefix}routed_expert_up_proj")
        return up + self.mlp(x, f"{prefix}shared_experts.")

    def mla(self, x: Tensor, prefix: str) -> Tensor:
        """Multi-head latent attention without positions, with an output gate."""
        c = self.config
        tokens, heads = x.shape[0], c["num_attention_heads"]
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        latent_q = self.norm(self.linear(x, f"{prefix}q_a_proj"), f"{prefix}q_a_layernorm")
        q = self.linear(latent_q, f"{prefix}q_b_proj").view(tokens, heads, nope + rope)
        compressed, shared_key = self.linear(x, f"{prefix}kv_a_proj_with_mqa").split(
            [c["kv_lora_rank"], rope], dim=-1
        )
        compressed = self.norm(compressed, f"{prefix}kv_a_layernorm")
        kv = self.linear(compressed, f"{prefix}kv_b_proj").view(tokens, heads, nope + value)
        k = torch.cat([kv[..., :nope], shared_key.unsqueeze(1).expand(tokens, heads, rope)], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(nope + rope)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), kv[..., nope:])
        gate = self.linear(x, f"{prefix}g_proj").sigmoid()
        return self.linear(out.reshape(tokens, -1) * gate, f"{prefix}o_proj")

    def kda(self, x: Tensor, prefix: str) -> Tensor:
        """Kimi delta attention."""
        c = self.config["linear_attn_config"]
        tokens, heads, dim = x.shape[0], c["num_heads"], c["head_dim"]
        q, k, v = (
            self.short_conv(self.linear(x, f"{prefix}{n}_proj"), f"{prefix}{n}_conv1d").view(
                tokens, heads, dim
            )
            for n in "qkv"
        )
        q = q / (q.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(dim)
        k = k / (k.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
        raw = self.linear(self.linear(x, f"{prefix}f_a_proj"), f"{prefix}f_b_proj")
        raw = (raw + self.weight(f"{prefix}dt_bias")).view(tokens, heads, dim)
        speed = self.weight(f"{prefix}A_log").flatten()[:heads].exp().unsqueeze(-1)
        keep = (c["gate_lower_bound"] * (speed * raw).sigmoid()).exp()
        step = self.linear(x, f"{prefix}b_proj").sigmoid()

        state = torch.zeros(heads, dim, dim, dtype=self.dtype)  # [H, K, V]
        out = []
        for t in range(tokens):
            state = state * keep[t].unsqueeze(-1)
            seen = torch.einsum("hkv,hk->hv", state, k[t])
            correction = step[t].unsqueeze(-1) * (v[t] - seen)
            state = state + torch.einsum("hk,hv->hkv", k[t], correction)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        o = self.norm(torch.stack(out), f"{prefix}o_norm", eps=1e-5)
        gate = self.linear(x, f"{prefix}g_proj").sigmoid()
        return self.linear(o.reshape(tokens, -1) * gate, f"{prefix}o_proj")

    def short_conv(self, x: Tensor, name: str) -> Tensor:
        """Causal depthwise convolution, then SiLU. The last tap meets the current token."""
        taps = self.weight(f"{name}.weight")[:, 0]  # [C, width]
        width = taps.shape[1]
        padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
        out = sum(padded[i : i + x.shape[0]] * taps[:, i] for i in range(width))
        return out * out.sigmoid()
