"""A small vision transformer: patches of 2 × 2 pixels, and the mean of all tokens to the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Sizes", "ViT"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    #: pixels of a side of an image, and of a patch
    image: int = 8
    patch: int = 2
    width: int = 128
    hidden: int = 256
    blocks: int = 4
    heads: int = 4
    classes: int = 10

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2


class Attention(nn.Module):
    """Attention of all tokens to all, queries, keys and values by one matrix."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.up, self.down = (
            nn.Linear(sizes.width, sizes.hidden),
            nn.Linear(sizes.hidden, sizes.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Logits of the classes: (B, side, side) pixels from 0 to 1 -> (B, classes)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        sizes = sizes or Sizes()
        self.patch = sizes.patch
        self.embed = nn.Linear(sizes.patch**2, sizes.width)
        self.places = nn.Parameter(torch.zeros(sizes.tokens, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.classes)

    def forward(self, images: Tensor) -> Tensor:
        p = self.patch
        patches = images.unflatten(1, (-1, p)).unflatten(3, (-1, p)).transpose(2, 3)
        x = self.embed(patches.flatten(3).flatten(1, 2)) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
