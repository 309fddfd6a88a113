"""Small models whose scale groups and rotation sites can be told by looking at them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, SHARED, HEAD = 12, 4, 2, 6


class RMSNorm(nn.Module):
    """x / rms(x) · (offset + weight)."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(width) - offset), offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class Attention(nn.Module):
    """Four heads of queries, two of keys and values, with or without rotary positions."""

    def __init__(self, *, rotary: bool, eager: bool = False) -> None:
        super().__init__()
        self.rotary, self.eager = rotary, eager
        self.q = nn.Linear(WIDTH, HEADS * HEAD)
        self.kv = nn.Linear(WIDTH, 2 * SHARED * HEAD)
        self.o = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (self.q(x), k, v))
        if self.rotary:
            q, k = _rotary(q), _rotary(k)
        if self.eager:
            k, v = (t.repeat_interleave(HEADS // SHARED, 1) for t in (k, v))
            found = torch.softmax(q @ k.transpose(-1, -2) * HEAD**-0.5, -1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(found.transpose(1, 2).flatten(2))


def _rotary(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * torch.logspace(0, -1, x.shape[-1] // 2)
    angles = torch.cat((angles, angles), -1)
    one, other = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-other, one), -1) * angles.sin()


class Gated(nn.Module):
    """down(silu(gate) · up)."""

    def __init__(self, hidden: int = 20) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """Embedding, one layer, norm, head."""

    def __init__(
        self, norm: type[nn.Module] = RMSNorm, *, tied: bool = False, rotary: bool = True
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30, bias=False)
        self.one, self.two, self.last = norm(WIDTH), norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = Attention(rotary=rotary), Gated()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.one(x))
        x = x + self.mlp(self.two(x))
        return self.head(self.last(x))


def ids() -> Tensor:
    return torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(1))


def randomized(model: nn.Module) -> nn.Module:
    """With norms, biases and statistics that are not what they are initialized to."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator))
    return model.eval()


def normals(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(normals(size, size))[0]
