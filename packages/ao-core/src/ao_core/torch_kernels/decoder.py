"""The reference of the op `decoder`: those of the ops that it is made of, one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.tensor.decoder import CachedBlock, CachedBlocks, Decoded, OutputHead
from ao_core.torch_kernels.attend import attend
from ao_core.torch_kernels.blocks import mlp, normed, qkv
from ao_core.torch_kernels.tail import write_tail

__all__ = ["decoder"]


def decoder(
    x: Tensor,
    blocks: CachedBlocks,
    cosine: Tensor,
    sine: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
) -> Decoded:
    """What each block returns, and the logits."""
    made = []
    for block in blocks.blocks:
        x = _block(x, block, cosine, sine, start, stop)
        made.append(x)
    logits = x.new_empty((*x.shape[:-1], 0)) if blocks.head is None else _logits(x, blocks.head)
    return Decoded(torch.stack(made), logits)


def _logits(x: Tensor, head: OutputHead) -> Tensor:
    return F.linear(x if head.norm is None else normed(x, head.norm), *head.projection)


def _block(
    x: Tensor,
    block: CachedBlock,
    cosine: Tensor,
    sine: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
) -> Tensor:
    cache = block.cache
    query, key, value = qkv(x, block.before, block.inputs, cosine, sine, block.heads)
    write_tail(cache.counts, cache.tail_key, cache.tail_value, key, value, 0)
    mixed = attend(
        query, cache.key, cache.value, cache.counts, cache.tail_key, cache.tail_value, cache.center,
        start, stop, block.sinks, block.attention,
    )  # fmt: skip
    mixed = mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)
    return mlp(mixed, x, block.norm, block.output, block.gate_up, block.down, block.gate)
