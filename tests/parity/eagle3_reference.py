"""EAGLE-3's drafter once more, from the paper's equations: dense tensors, no pages, no kernels, none of our modules.

It reads a raw checkpoint's tensors by name and computes whole sequences at once. Row p has the fused feature of
position p and the token at p + 1; it predicts the token at p + 2. Rotary convention: Llama's (rotate halves), row p at
position p.

Legend: T rows, H hidden, Hq/Hk heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Raw tensors and the few numbers the equations need."""

    tensors: dict[str, Tensor]
    embedding: Tensor  # [V, H]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float
    eps: float
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __call__(self, aux: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """aux [T, A*H], tokens [T] (each row's next) -> draft logits [T, D] and the hidden state fed back [T, H]."""
        return self.layer(self.fused(aux), tokens)

    def fused(self, aux: Tensor) -> Tensor:
        """g = fc(aux) [T, H]"""
        if self.norm_before_fc:
            aux = self.rms(aux, "input_norm.weight")
        if self.fc_norm:
            parts = aux.chunk(3, dim=-1)
            aux = torch.cat([self.rms(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=-1)
        return aux @ self.tensors["fc.weight"].T

    def layer(self, g: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.rms(self.embedding[tokens], "midlayer.input_layernorm.weight")
        feature = self.rms(g, "midlayer.hidden_norm.weight")
        y = feature if self.norm_before_residual else g
        y = y + self.attention(torch.cat([embedded, feature], dim=-1))
        y = y + self.mlp(self.rms(y, "midlayer.post_attention_layernorm.weight"))
        normed = self.rms(y, "norm.weight")
        return normed @ self.tensors["lm_head.weight"].T, normed if self.norm_output else y

    def attention(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        q = self.rotate(self.heads(x, "q_proj", self.num_heads))
        k = self.rotate(self.heads(x, "k_proj", self.num_kv_heads))
        v = self.heads(x, "v_proj", self.num_kv_heads)
        out = []
        for head in range(self.num_heads):
            shared = head * self.num_kv_heads // self.num_heads
            scores = q[:, head] @ k[:, shared].T / self.head_dim**0.5
            scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
            out.append(scores.softmax(-1) @ v[:, shared])
        return torch.cat(out, dim=-1) @ self.tensors["midlayer.self_attn.o_proj.weight"].T

    def heads(self, x: Tensor, name: str, count: int) -> Tensor:
        return (x @ self.tensors[f"midlayer.self_attn.{name}.weight"].T).reshape(len(x), count, self.head_dim)

    def rotate(self, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        angle = torch.arange(len(x))[:, None] * self.theta ** (-torch.arange(half) / half)  # [T, D/2]
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # complex [T, 1, D/2]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def mlp(self, x: Tensor) -> Tensor:
        gate = x @ self.tensors["midlayer.mlp.gate_proj.weight"].T
        up = x @ self.tensors["midlayer.mlp.up_proj.weight"].T
        return (gate * torch.sigmoid(gate) * up) @ self.tensors["midlayer.mlp.down_proj.weight"].T

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.tensors[name]
