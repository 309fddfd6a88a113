"""The references of the ops `qkv` and `mlp`: a decoder block before and after attention, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.tensor.blocks import Heads, NormBefore, Projection

__all__ = ["gated", "mlp", "normed", "qkv", "rotated"]


def normed(x: Tensor, norm: NormBefore) -> Tensor:
    """The RMS norm, rounded where models round it; see `GAINS`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.gain == "rounded":
        return norm.weight * wide.to(x.dtype)
    gain = norm.weight.to(wide.dtype) + (1.0 if norm.gain == "plus_one" else 0.0)
    return (wide * gain).to(x.dtype)


def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """The activation of the gate, rounded to its dtype, times `up`."""
    active = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
    return active * up


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of the first elements of heads (B, H, T, D), as many as the tables (B, 1, T, R) have.

    Halves of what is rotated are turned against each other. Source: Su et al., "RoFormer" (2021),
    arXiv:2104.09864, with the order of elements of GPT-NeoX.
    """
    size = cosine.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    other = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cosine + other * sine, rest], dim=-1)


def qkv(
    x: Tensor,
    norm: NormBefore | None,
    weight: Projection,
    cosine: Tensor,
    sine: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Three of the results of one matmul, taken apart into heads."""
    rows = F.linear(x if norm is None else normed(x, norm), *weight)
    split = rows.unflatten(-1, (-1, heads.dim)).transpose(1, 2)
    query, key, value = split.split([heads.query, heads.key, heads.key], dim=1)
    tables = cosine.unsqueeze(1), sine.unsqueeze(1)
    query, key = rotated(query, *tables), rotated(key, *tables)
    return query.contiguous(), key.contiguous(), value.contiguous()


def mlp(
    x: Tensor,
    residual: Tensor | None,
    norm: NormBefore | None,
    output: Projection | None,
    gate_up: Projection,
    down: Projection,
    gate: str,
) -> Tensor:
    """Each step as the models write it."""
    h = x if output is None else F.linear(x, *output)
    h = h if residual is None else residual + h
    both = F.linear(h if norm is None else normed(h, norm), *gate_up)
    first, second = both.chunk(2, dim=-1)
    made = F.linear(gated(first, second, gate), *down)
    return made if residual is None else h + made
