"""Trials of the ops "qkv" and "mlp": in float64, rounded where the ops say that models round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.records import OpCall
from ao_core.spec import WHOLE, Spec
from ao_core.tensor.blocks import GAINS, GATES, BlockCall, Heads, NormBefore, Projection
from ao_core.testing.base import gaussian
from ao_core.testing.samples import holds, quantized
from ao_core.testing.trials import KernelCase, OpTrial, strided_variants

__all__ = ["MLP", "QKV", "block_head", "block_mlp", "block_qkv"]

_EPS = 1e-3


class _Block(OpTrial):
    """What both have in common. A batch is what x has before its last dimension."""

    specs = (
        Spec("int4", (1, 32), "bfloat16", layout="packed"),
        Spec("uint4", (1, 16), "float16", "int", "packed"),
        Spec("nf4", (1, 32), "float32", layout="packed"),
        Spec("int8", (1, WHOLE), "bfloat16"),
        Spec("f8e4m3", (1, WHOLE)),
    )
    batches = ((1, 1), (2, 3), (1, 40), (1, 0))

    def odd_calls(self, call: Any) -> Iterator[OpCall]:
        for dtype in (torch.float16, torch.float64):
            yield replace(call, x_dtype=dtype)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        pairs = (
            zip(actual, expected, strict=True)
            if isinstance(actual, tuple)
            else ((actual, expected),)
        )
        for one, other in pairs:
            super().check(one, other, case, bound)

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for variant in strided_variants(args[0]):
            yield (variant, *args[1:])


def _draw(case: KernelCase, seed: int, *shape: int) -> Tensor:
    return gaussian(shape, seed=seed, device=case.device).to(case.dtype)


def _weight(case: KernelCase, seed: int, n: int, k: int, *, bias: bool) -> Projection:
    values = gaussian((n, k), seed=seed, device=case.device) / math.sqrt(k)
    return Projection(quantized(values, case.spec), _draw(case, seed + 1, n) if bias else None)


def _multiplied(x: Tensor, weight: Projection, dtype: torch.dtype) -> Tensor:
    """In float64, rounded."""
    rows = x.double() @ weight.weight.dequantize(torch.float32).double().t()
    rows = rows if weight.bias is None else rows + weight.bias.double()
    return rows.to(dtype)


def _normed(x: Tensor, norm: NormBefore | None) -> Tensor:
    if norm is None:
        return x
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    if norm.gain == "rounded":
        return (wide.to(x.dtype).double() * norm.weight.double()).to(x.dtype)
    return (wide * (norm.weight.double() + (norm.gain == "plus_one"))).to(x.dtype)


def block_head(x: Tensor, norm: NormBefore | None, weight: Projection) -> Tensor:
    """Logits in float64, of normed rows."""
    return _multiplied(_normed(x, norm), weight, torch.float64)


class _Qkv(_Block):
    """The weight (N, K) has N / 5 elements for a head: three of queries, one of keys, one of values."""

    shapes = ((80, 64), (50, 70))

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        shape = (*batch, case.shape[1])
        return BlockCall(op, ((case.spec, case.shape),), shape, case.dtype, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        n, k = case.shape
        heads = Heads(3, 1, n // 5)
        x = _draw(case, 9 * seed, *batch, k)
        for turn, gain in enumerate(GAINS):
            norm = NormBefore(_draw(case, 1, k), _EPS, gain) if turn else None
            weight = _weight(case, 2, n, k, bias=bool(turn % 2))
            size = heads.dim if turn else heads.dim // 4 * 2
            tables = _draw(case, 4 + turn, 2, batch[0] if turn else 1, batch[1], size)
            args = (x, norm, weight, *tables, heads)
            yield args, block_qkv(*args)


def block_qkv(
    x: Tensor,
    norm: NormBefore | None,
    weight: Projection,
    cosine: Tensor,
    sine: Tensor,
    heads: Heads,
) -> tuple[Tensor, ...]:
    """One head and token after the other."""
    rows = _multiplied(_normed(x, norm), weight, x.dtype).unflatten(-1, (-1, heads.dim))
    half, size = cosine.shape[-1] // 2, cosine.shape[-1]
    found = rows.clone()
    for i in range(size):
        other = rows[..., i + half] * -1 if i < half else rows[..., i - half]
        turned = heads.query + heads.key  # heads from here on are values
        c, s = cosine[:, :, None, i].double(), sine[:, :, None, i].double()
        sums = (rows[..., i].double() * c).to(x.dtype).double()
        sums = sums + (other.double() * s).to(x.dtype).double()
        found[:, :, :turned, i] = sums.to(x.dtype)[:, :, :turned]
    split = found.transpose(1, 2).double().split([heads.query, heads.key, heads.key], dim=1)
    return tuple(split)


class _Mlp(_Block):
    """The weight (N, K) is that of gate and up."""

    shapes = ((96, 64), (64, 70))

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        n, k = shape
        fit = [s for s in specs if all(holds(layout, (k, m), s) for m in (n // 2, k, 48))]
        return super().fitting(layout, shape, fit)

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        n, k = case.shape
        weights = ((case.spec, case.shape), (case.spec, (k, n // 2)))
        return BlockCall(op, weights, (*batch, k), case.dtype, case.device, "silu")

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        n, k = case.shape
        for turn, (gain, gate) in enumerate(zip(GAINS, (*GATES, "silu"), strict=True)):
            width = 48 if turn else k
            output = _weight(case, 11, k, width, bias=turn == 2) if turn else None
            args = (
                _draw(case, 9 * seed, *batch, width),
                _draw(case, 9 * seed + 1, *batch, k) if turn != 1 else None,
                NormBefore(_draw(case, 1, k), _EPS, gain) if turn != 2 else None,
                output,
                _weight(case, 13, n, k, bias=turn == 1),
                _weight(case, 15, k, n // 2, bias=turn == 0),
                gate,
            )
            yield args, block_mlp(*args)


def block_mlp(
    x: Tensor,
    residual: Tensor | None,
    norm: NormBefore | None,
    output: Projection | None,
    gate_up: Projection,
    down: Projection,
    gate: str,
) -> Tensor:
    """The op `mlp` in float64, rounded to the dtype of x where a model rounds."""
    h = x if output is None else _multiplied(x, output, x.dtype)
    h = h if residual is None else (h.double() + residual.double()).to(x.dtype)
    both = _multiplied(_normed(h, norm), gate_up, x.dtype).double()
    first, second = both.chunk(2, dim=-1)
    inner = first if gate == "silu" else 2 * math.sqrt(2 / math.pi) * (first + 0.044715 * first**3)
    active = (first * inner.sigmoid()).to(x.dtype).double()
    made = _multiplied((active * second).to(x.dtype), down, x.dtype).double()
    return made if residual is None else made + h.double()


#: what `Op.trials` returns
QKV, MLP = _Qkv(), _Mlp()
