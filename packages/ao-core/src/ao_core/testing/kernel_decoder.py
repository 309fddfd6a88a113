"""Trials of the op "decoder": its blocks one after the other, in float64, rounded where models round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.records import Kernel, OpCall
from ao_core.spec import WHOLE, Spec
from ao_core.tensor.attention import Attention
from ao_core.tensor.blocks import GAINS, GATES, Heads, NormBefore, Projection
from ao_core.tensor.decoder import (
    CachedBlock,
    CachedBlocks,
    DecoderCall,
    KeysAndValues,
    OutputHead,
)
from ao_core.testing.base import gaussian, same_bits
from ao_core.testing.kernel_attend import attended
from ao_core.testing.kernel_blocks import block_head, block_mlp, block_qkv
from ao_core.testing.samples import holds, quantized
from ao_core.testing.trials import KernelCase, OpTrial, strided_variants

__all__ = ["DECODER", "Decoding"]

_INT4 = Spec("int4", (1, 32), "bfloat16", layout="packed")
_TOKEN = Spec("int8", (1, WHOLE), "float16")
_GROUP = Spec("uint4", (1, 64), "float16", "int", "packed")
_HEADS, _SIZE, _SLOTS = Heads(4, 2, 16), 256, 140
#: rows of a head
_VOCABULARY = 130


@dataclass(frozen=True)
class Decoding:
    """What differs between the calls of a case."""

    batch: int
    tokens: int
    #: that there are before, and how many of them are quantized
    before: int
    coded: int
    #: whether rows of the batch begin with padding
    padded: bool = False
    #: whether logits are made of what the last block returns
    head: bool = False


class _Decoder(OpTrial):
    """The shape of a case is that of x @ qkv, its specs are of weights, of keys and of values."""

    specs: Sequence[Any] = ((_INT4, _TOKEN, _GROUP), (Spec("int8", (1, WHOLE)), _TOKEN, _TOKEN))
    shapes = ((48,), (70,))
    batches: Sequence[Any] = (
        Decoding(1, 1, 0, 0),
        Decoding(1, 1, 200, 128, head=True),
        Decoding(2, 3, 100, 0, padded=True, head=True),
        Decoding(1, 5, 138, 128),
    )

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        """In the layouts of the kernel."""
        return [
            (spec, *others)
            for layout in self.layouts(kernel)
            for weight, *others in specs
            for spec in self.fitting(layout, shape, [weight.in_layout(layout.name)])
        ]

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        shapes = [*_shapes(shape[0]), (_VOCABULARY, shape[0])]
        return [spec for spec in specs if all(holds(layout, one, spec) for one in shapes)]

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        _, key, value = case.specs
        weights = tuple((_format(case, shape), shape) for shape in _shapes(case.shape[0]))
        keys = (batch.batch, _HEADS.key, _SIZE, _HEADS.dim)
        x_shape = (batch.batch, batch.tokens, *case.shape)
        shape = (_VOCABULARY, case.shape[0])
        head = (_format(case, shape), shape) if batch.head else None
        return DecoderCall(
            (weights,) * 2, ((key, value),) * 2, (keys,) * 2, x_shape, case.dtype, case.device, head,
            op,
        )  # fmt: skip

    def odd_calls(self, call: Any) -> Iterator[OpCall]:
        for dtype in (torch.float16, torch.float64):
            yield replace(call, x_dtype=dtype)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        k = case.shape[0]
        drawn = iter(range(100 * seed, 100 * seed + 100))

        def draw(*shape: int) -> Tensor:
            return gaussian(shape, seed=next(drawn), device=case.device).to(case.dtype)

        def weight(n: int, columns: int, *, bias: bool) -> Projection:
            values = gaussian((n, columns), seed=next(drawn), device=case.device)
            values = values / math.sqrt(columns)
            return Projection(
                quantized(values, _format(case, (n, columns))), draw(n) if bias else None
            )

        def norm(gain: str) -> NormBefore:
            return NormBefore(draw(k), 1e-3, gain)

        def block(turn: int) -> CachedBlock:
            rows = (batch.batch, _HEADS.key)
            stored = [quantized(draw(*rows, _SIZE, _HEADS.dim), spec) for spec in case.specs[1:]]
            keys, values = (draw(*rows, _SLOTS, _HEADS.dim) for _ in range(2))
            cache = KeysAndValues(
                stored[0],
                stored[1],
                torch.tensor([batch.before, batch.coded], device=case.device),
                keys,
                values,
                draw(*rows, 1, _HEADS.dim).float() if turn else None,
            )
            inputs, output, gate_up, down = (
                weight(*shape, bias=bool(turn)) for shape in _shapes(k)
            )
            attention = Attention(0.3, True, 100 * turn, 2.0 * turn)
            return CachedBlock(
                norm(GAINS[turn]), inputs, _HEADS, cache, draw(_HEADS.query) if turn else None,
                attention, output, norm(GAINS[turn + 1]), gate_up, down, GATES[turn],
            )  # fmt: skip

        head = None
        if batch.head:
            before = norm(GAINS[0]) if batch.batch == 1 else None
            head = OutputHead(before, weight(_VOCABULARY, k, bias=batch.batch > 1))
        blocks = CachedBlocks((block(0), block(1)), head)
        x = draw(batch.batch, batch.tokens, k)
        tables = draw(2, batch.batch if batch.padded else 1, batch.tokens, 12)
        start = torch.arange(batch.batch, device=case.device) + 5 if batch.padded else None
        args = (x, blocks, *tables, start, None)
        yield args, _expected(*args)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        x, blocks, *others = args
        blocks = CachedBlocks(tuple(_copied(block) for block in blocks.blocks), blocks.head)
        made = fn(x, blocks, *others)
        return *made, *(x for block in blocks.blocks for x in _written(block))

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        # which may be the beginning, if that is all that is known
        for found, wanted in zip(actual, expected, strict=False):
            if wanted.dtype == torch.int64:
                assert torch.equal(found, wanted), f"counts {found} instead of {wanted}"
            else:
                super().check(found, wanted, case, 2 * bound)  # of two blocks

    def same(self, a: Any, b: Any) -> bool:
        return all(map(same_bits, a, b))

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for x in strided_variants(args[0]):
            yield (x, *args[1:])


def _format(case: KernelCase, shape: tuple[int, int]) -> Spec:
    """Of a weight: input steps are for as many columns as x has."""
    spec = case.specs[0]
    return spec if shape[1] == case.shape[0] else replace(spec, input=())


def _shapes(k: int) -> list[tuple[int, int]]:
    """(N, K) of the four weights of a block."""
    rows = _HEADS.query * _HEADS.dim
    return [(rows + 2 * _HEADS.key * _HEADS.dim, k), (k, rows), (96, k), (k, 48)]


def _copied(block: CachedBlock) -> CachedBlock:
    cache = block.cache
    counts, key, value = (x.clone() for x in _written(block))
    return block._replace(cache=cache._replace(counts=counts, tail_key=key, tail_value=value))


def _written(block: CachedBlock) -> tuple[Tensor, Tensor, Tensor]:
    return block.cache.counts, block.cache.tail_key, block.cache.tail_value


def _expected(
    x: Tensor,
    blocks: CachedBlocks,
    cosine: Tensor,
    sine: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
) -> tuple[Tensor, ...]:
    made: list[Any] = []
    written: list[Any] = []
    for block in map(_copied, blocks.blocks):
        cache = block.cache
        query, key, value = (
            each.to(x.dtype)
            for each in block_qkv(x, block.before, block.inputs, cosine, sine, block.heads)
        )
        before = int(cache.counts[0])
        for t in range(x.shape[1]):
            cache.tail_key[:, :, (before + t) % _SLOTS] = key[:, :, t]
            cache.tail_value[:, :, (before + t) % _SLOTS] = value[:, :, t]
        cache.counts[0] += x.shape[1]
        mixed = attended(
            query, cache.key, cache.value, cache.counts, cache.tail_key, cache.tail_value,
            cache.center, start, stop, block.sinks, block.attention,
        ).to(x.dtype)  # fmt: skip
        rows = mixed.transpose(1, 2).flatten(2)
        wide = block_mlp(rows, x, block.norm, block.output, block.gate_up, block.down, block.gate)
        x = wide.to(x.dtype)
        made.append(x)
        written += _written(block)
    head = blocks.head
    logits = x[..., :0] if head is None else block_head(x, head.norm, head.projection)
    return (torch.stack(made), logits, *written)


#: what `Op.trials` returns
DECODER = _Decoder()
