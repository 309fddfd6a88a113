"""A Llama-shaped decoder, as few calls of torch as eager mode allows; the benchmarks of CPUs share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; by default 1.1 billion parameters."""

    layers: int = 22
    dim: int = 2048
    heads: int = 32
    kv_heads: int = 4
    ffn: int = 5632
    vocab: int = 32000
    #: most tokens of a sequence
    context: int = 640

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """Numbers in all matrices."""
        attention = 2 * self.dim * (self.dim + self.kv_heads * self.head_dim)
        return self.layers * (attention + 3 * self.dim * self.ffn) + 2 * self.vocab * self.dim


class Place(NamedTuple):
    """Where tokens (S,) stand, and what they see: a text from its beginning, or one token."""

    #: (S,) int64
    positions: Tensor
    #: entries of the cache that are attended to
    length: int
    #: of one token: which of these it sees, (1, length); None: all
    mask: Tensor | None = None


def after(start: int, tokens: int, device: torch.device | str = "cpu") -> Place:
    """Tokens that follow `start` others; more than one have to be the first."""
    return Place(torch.arange(start, start + tokens, device=device), start + tokens)


def anywhere(position: Tensor, length: int) -> Place:
    """One token at a position (1,) that only the device knows, so that all shapes stay the same."""
    return Place(
        position, length, torch.arange(length, device=position.device) <= position[:, None]
    )


class Block(nn.Module):
    """Attention and feed-forward. Projections of one input are one layer: q, k, v; gate and up."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        both = shape.heads + 2 * shape.kv_heads
        self.shape = shape
        self.attention_norm = nn.Parameter(torch.ones(shape.dim))
        self.ffn_norm = nn.Parameter(torch.ones(shape.dim))
        self.qkv = nn.Linear(shape.dim, both * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate_up = nn.Linear(shape.dim, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor, cache: Tensor, rope: Tensor, place: Place) -> Tensor:
        """One layer for tokens x (S, dim); keys and values of those before are cached."""
        x = x + self.out(self.attention(norm(x, self.attention_norm), cache, rope, place))
        gate, up = self.gate_up(norm(x, self.ffn_norm)).split(self.shape.ffn, -1)
        return x + self.down(F.silu(gate) * up)

    def attention(self, x: Tensor, cache: Tensor, rope: Tensor, place: Place) -> Tensor:
        """Grouped-query attention; cache (2, kv_heads, context, head_dim) takes the new tokens."""
        s, heads, kv_heads = len(x), self.shape.heads, self.shape.kv_heads
        qkv = rotated(self.qkv(x).view(s, -1, self.shape.head_dim), rope)
        q, new = qkv.split((heads, 2 * kv_heads), 1)
        new = new.unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3)
        cache.index_copy_(2, place.positions, new)
        keys, values = cache[:, None, :, : place.length].unbind()
        if s == 1:  # the heads that share keys stand where tokens would: nothing is repeated
            q = q.view(1, kv_heads, heads // kv_heads, -1)
            loops = x.is_cpu and torch.compiler.is_compiling()
            attend = attention_of_one if loops else F.scaled_dot_product_attention
            found = attend(q, keys, values, place.mask)
        else:
            q = q[None].transpose(1, 2)
            found = F.scaled_dot_product_attention(
                q, keys, values, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        return found.reshape(s, -1)


class Decoder(nn.Module):
    """Tokens to the logits of the last one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.dim))
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(
        self, tokens: Tensor, cache: Sequence[Tensor], rope: Tensor, place: Place
    ) -> Tensor:
        """Logits (vocab,) after tokens (S,): the first ones of a text, or one more."""
        x = self.embedding(tokens)
        rope = rope.index_select(1, place.positions)
        for block, part in zip(self.blocks, cache, strict=True):
            x = block(x, part, rope, place)
        found: Tensor = self.head(norm(x[-1:], self.norm))[0]
        return found


def attention_of_one(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of a single token in plain operations, which are compiled into loops.

    On a CPU, the kernel that eager mode calls takes longer to start than to compute.
    """
    q = q.as_strided(q.shape, q.stride())  # computed once, not anew in the innermost loop
    scores = (q.float()[..., None, :] * keys.float()[..., None, :, :]).sum(-1)
    scores = scores / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.where(mask, float("-inf"))
    weighted = scores.softmax(-1)[..., None] * values.float()[..., None, :, :]
    return weighted.sum(-2).to(q.dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square normalization; the weight holds the factor √dim. `F.rms_norm` takes 11 calls."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) * weight


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding of x (S, heads, head_dim), whose halves are the pairs."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x * rope[0], swapped, rope[1])


def rope_table(shape: Shape, dtype: torch.dtype) -> Tensor:
    """(2, context, all heads, head_dim): factors of an element and of its partner in the other half.

    Queries and keys turn with their position; values, which lie behind them, stay.
    """
    half = shape.head_dim // 2
    angles = torch.outer(torch.arange(shape.context), 10000.0 ** (-torch.arange(half) / half))
    cos, sin = angles.cos(), angles.sin()
    turning = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])[:, :, None]
    resting = torch.stack([torch.ones_like(turning[0]), torch.zeros_like(turning[0])])
    counts = shape.heads + shape.kv_heads, shape.kv_heads
    parts = (part.repeat(1, 1, n, 1) for part, n in zip((turning, resting), counts, strict=True))
    return torch.cat(list(parts), 2).to(dtype)


def empty_cache(
    shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """(2, kv_heads, context, head_dim) for keys and values, of each layer.

    Not views of one tensor: a compiled program would copy all of it for each layer that writes there.
    """
    sizes = 2, shape.kv_heads, shape.context, shape.head_dim
    return [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]


def random_model(
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str = "cpu",
    std: float | None = None,
    epilogue: Callable[[nn.Module], object] = lambda part: None,
) -> Decoder:
    """A model with normal weights; each matrix has its own.

    Args:
        shape: sizes.
        dtype: of all parameters.
        device: where they are made.
        std: of the weights; by default what keeps the size of activations.
        epilogue: called with the embedding, each block and the head as soon as it has its weights: what
            quantizes it there never has the whole model in `dtype`.
    """
    with torch.device("meta"):
        model = Decoder(shape).to(dtype).requires_grad_(False)
    model.norm = nn.Parameter(torch.empty(shape.dim, dtype=dtype, device=device), False)
    model.norm.fill_(math.sqrt(shape.dim))
    # drawing a billion numbers takes long on a CPU
    noise = torch.empty(1 << 22, dtype=dtype, device=device).normal_()
    numbers = count()
    for part in (model.embedding, *model.blocks, model.head):
        part.to_empty(device=device)
        for parameter in part.parameters():
            if parameter.dim() == 1:
                parameter.fill_(math.sqrt(shape.dim))
            else:
                size = 1 / math.sqrt(parameter.shape[-1]) if std is None else std
                fill(parameter, noise.roll(4097 * next(numbers)), size)
        epilogue(part)
    return model.eval()


def fill(parameter: Tensor, noise: Tensor, std: float) -> None:
    """Write the noise, times std, into a parameter, as often as it fits, shifted each time."""
    flat = parameter.view(-1)
    for number, part in enumerate(flat.split(len(noise))):
        part.copy_(noise.roll(-number)[: len(part)]).mul_(std)
