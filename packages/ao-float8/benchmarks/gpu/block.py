"""A decoder block of the shape of Llama-3-8B's, scaled by its width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block"]

_HEAD = 128


class Block(nn.Module):
    """Attention with grouped queries and a gated MLP, each after RMSNorm, without biases.

    Args:
        width: of the residual stream: 4096 in Llama-3-8B; a multiple of 128.
        sequence: tokens that attend to each other.
    """

    def __init__(self, width: int, sequence: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = width // _HEAD, max(width // _HEAD // 4, 1)
        hidden, kv = width * 7 // 2, self.kv_heads * _HEAD
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wqkv = nn.Linear(width, width + 2 * kv, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w13 = nn.Linear(width, 2 * hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        angles = torch.outer(torch.arange(sequence), 500000.0 ** -torch.linspace(0, 1, _HEAD // 2))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, sequence, width)."""
        x = x + self._attend(self.attention_norm(x))
        gate, up = self.w13(self.mlp_norm(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)

    def _attend(self, x: Tensor) -> Tensor:
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.wqkv(x).unflatten(-1, (sum(sizes), _HEAD)).transpose(1, 2).split(sizes, 1)
        q, k = self._rotated(q), self._rotated(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-b, a], -1) * self.sin.to(x.dtype)
