"""Small models of several families, with gains, biases and outliers as trained ones have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEAD, HIDDEN = 32, 8, 48


class RMSNorm(nn.Module):
    """x / rms(x) · (offset + weight): Gemma's has an offset of 1."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(width) - offset), offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class Attention(nn.Module):
    """Four heads of queries, two of keys and values, with or without norms of queries and keys."""

    def __init__(self, *, norms: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 4 * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, 2 * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, 2 * HEAD)
        self.o_proj = nn.Linear(4 * HEAD, WIDTH)
        self.q_norm, self.k_norm = (RMSNorm(HEAD) if norms else nn.Identity() for _ in "qk")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, HEAD)) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (t.transpose(1, 2) for t in (_rotary(self.q_norm(q)), _rotary(self.k_norm(k)), v))
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


def _rotary(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None, None] * torch.logspace(0, -1, x.shape[-1] // 2)
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Gated(nn.Module):
    """down(silu(gate) · up)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in "gu")
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Decoder(nn.Module):
    """A layer of a language model."""

    def __init__(self, *, offset: float = 0.0, norms: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(60, WIDTH), nn.Linear(WIDTH, 60, bias=False)
        self.one, self.two, self.last = (RMSNorm(WIDTH, offset) for _ in range(3))
        self.attn, self.mlp = Attention(norms=norms), Gated()
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        x = x + self.attn(self.one(x))
        x = x + self.mlp(self.two(x))
        return self.lm_head(self.last(x))


class Encoder(nn.Module):
    """A layer with LayerNorm before each part, and GELU, through which no scale passes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, WIDTH), nn.Linear(WIDTH, 5)
        self.one, self.two, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attn = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attn(self.one(x))
        x = x + self.fc2(F.gelu(self.fc1(self.two(x))))
        return self.head(self.last(x))


def mlp() -> nn.Sequential:
    """Scales pass through ReLU, between each two weights."""
    return nn.Sequential(
        nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 6)
    )


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(6 * 4 * 4, 5),
    )


FAMILIES: dict[str, Any] = {
    "llama": Decoder,
    "llama tied": lambda: Decoder(tied=True),
    "qwen3": lambda: Decoder(norms=True),
    "gemma": lambda: Decoder(offset=1.0, tied=True),
    "encoder": Encoder,
}


def made(make: Any, *, outlier: float = 1.0, seed: int = 0) -> nn.Module:
    """A model with gains and biases that are not what they are initialized to, in evaluation mode.

    Args:
        make: of a model.
        outlier: by which channel 3 of the first norm's gains is multiplied, and its readers' columns divided.
        seed: of all parameters.
    """
    generator = torch.Generator().manual_seed(seed)
    model = make()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(noise * (1.0 if "embed" in name else tensor[0].numel() ** -0.5))
            else:
                tensor.add_(0.3 * noise.abs())
        if outlier != 1:
            norm = model.one
            offset = getattr(norm, "offset", 0.0)
            norm.weight[3] = (norm.weight[3] + offset) * outlier - offset
            for reader in (model.attn.q_proj, model.attn.k_proj, model.attn.v_proj):
                reader.weight[:, 3] /= outlier
    return model.eval()


def tokens(count: int = 3) -> list[Tensor]:
    """Batches; the rows are more than any layer has columns."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, 60, (2, 20), generator=generator) for _ in range(count)]


def difference(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return float((found.detach() - expected.detach()).norm() / expected.detach().norm())
