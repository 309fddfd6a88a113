"""Trials of the ops "write_tail" and "encode_tokens": bit for bit, and nothing else is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ao_core.records import Kernel, OpCall
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor.create import quantize_values
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.tail import EncodeTokensCall, WriteTailCall
from ao_core.testing.base import gaussian
from ao_core.testing.samples import holds, quantized
from ao_core.testing.trials import KernelCase, OpTrial, strided_variants

__all__ = ["ENCODE_TOKENS", "WRITE_TAIL"]

_SLOTS = 24


class _WriteTail(OpTrial):
    """A batch is (tokens before, T, quantized tokens then); the shape of a case (B, Hkv, D)."""

    specs: Sequence[Any] = ((),)
    shapes = ((2, 3, 64), (1, 1, 5))
    batches: Sequence[Any] = (
        (0, 1, 0),
        (23, 1, 0),
        (24, 1, 1),
        (0, 7, 0),
        (20, 9, 8),
        (3, 40, 30),
        (5, 0, 0),
    )

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[()]]:
        """Nothing is quantized."""
        return [()]

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        return WriteTailCall(case.dtype, case.device, op)

    def odd_calls(self, call: Any) -> Iterator[OpCall]:
        yield replace(call, dtype=torch.float64)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        (rows, heads, dim), (before, new, coded) = case.shape, batch

        def draw(place: int, tokens: int, width: int) -> Tensor:
            made = gaussian((rows, heads, tokens, width), seed=9 * seed + place, device=case.device)
            return made.to(case.dtype)

        key, value = draw(0, new, dim), draw(1, new, dim + 3)
        tails = [draw(2, _SLOTS, dim), draw(3, _SLOTS, dim + 3)]
        expected = [x.clone() for x in tails]
        for token in range(max(before, coded), before + new):
            for tail, rows_of in zip(expected, (key, value), strict=True):
                tail[:, :, token % _SLOTS] = rows_of[:, :, token - before]
        counts = torch.tensor([before, 0], device=case.device)
        total = torch.tensor([before + new, coded], device=case.device)
        yield (key, value, counts, *tails, coded), (total, *expected)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        key, value, *written, coded = args
        written = [x.clone() for x in written]
        fn(*written, key, value, coded)
        return tuple(written)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        for found, wanted in zip(actual, expected, strict=True):
            assert torch.equal(found, wanted), f"{found} instead of {wanted}"

    def same(self, a: Any, b: Any) -> bool:
        return all(map(torch.equal, a, b))

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for key in strided_variants(args[0]):
            yield (key, *args[1:])
        yield (*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[:2]), *args[2:])


#: what `Op.trials` returns
WRITE_TAIL = _WriteTail()


_TOKEN = Spec("int8", (1, WHOLE), "float16")
_GROUP = Spec("uint4", (1, 8), "float16", "float", "packed")
_CHANNEL = Spec("uint4", (16, 1), "float16", "float", "packed")


class _EncodeTokens(OpTrial):
    """A batch is (tokens before, T, begin, end, centered); the shape of a case that of the keys."""

    specs: Sequence[Any] = (
        (_TOKEN, _GROUP),
        (_CHANNEL, _GROUP),
        (Spec("f8e4m3", (1, WHOLE), "float32"), Spec("int8", (8, 1), "bfloat16")),
        (Spec("int4", (4, 8), "float16"), Spec("nf4", (1, 8), layout="packed")),
    )
    shapes = ((2, 3, 64, 16), (1, 2, 48, 24))
    batches: Sequence[Any] = (
        (20, 1, 0, 16, True),
        (0, 48, 0, 48, True),
        (30, 18, 16, 48, False),
        (24, 3, 5, 16, False),
    )

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        """The pairs whose formats hold such tensors, and whose first is in the kernel's layout."""
        return [
            pair
            for pair in specs
            if kernel.layout in ("*", pair[0].layout)
            and all(holds(registry.layouts.get(spec.layout), shape, spec) for spec in pair)
        ]

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        begin = batch[2]
        whole = all(begin % spec.block[-2] == 0 for spec in case.specs)
        (key, value), dim = case.specs, case.shape[3]
        return EncodeTokensCall(key, value, case.shape, dim + 8, case.dtype, whole, case.device, op)

    def odd_calls(self, call: Any) -> Iterator[OpCall]:
        yield replace(call, dtype=torch.float64)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        (rows, heads, size, dim), (before, new, begin, end, centered) = case.shape, batch
        device = case.device

        def draw(place: int, tokens: int, width: int) -> Tensor:
            made = gaussian((rows, heads, tokens, width), seed=9 * seed + place, device=device)
            return made.to(case.dtype)

        stored, tails, fresh, expected = [], [], [], []
        center = draw(9, 1, dim).float() if centered else None
        for place, spec in enumerate(case.specs):
            width = dim + 8 * place
            exact = draw(place, before + new, width)
            tail = draw(place + 2, 2 * _SLOTS, width)
            for token in range(max(0, before - 2 * _SLOTS), before):
                tail[:, :, token % (2 * _SLOTS)] = exact[:, :, token]
            old = quantized(draw(place + 4, size, width), spec)
            offset = center if place == 0 and center is not None else torch.zeros((), device=device)
            expected.append(_written(old, exact.float() - offset, begin, end))
            stored.append(old)
            tails.append(tail)
            fresh.append(exact[:, :, before:])
        yield (*stored, *tails, *fresh, center, before, begin, end), expected

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        stored = [_copy(x) for x in args[:2]]
        fn(*stored, *args[2:])
        return stored

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        assert self.same(actual, expected), f"{actual} instead of {expected}"

    def same(self, a: Any, b: Any) -> bool:
        return all(
            torch.equal(found, wanted)
            for x, y in zip(a, b, strict=True)
            for (_, found), (_, wanted) in zip(x.leaves(), y.leaves(), strict=True)
        )

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for key in strided_variants(args[4]):
            yield (*args[:4], key, *args[5:])


def _copy(x: QTensor) -> QTensor:
    return QTensor({n: p.clone() for n, p in x.parts.items()}, x.spec, tuple(x.shape), x.dtype)


def _written(old: QTensor, exact: Tensor, begin: int, end: int) -> QTensor:
    """A tensor with these tokens, block by block; those of a block that was begun by its scales."""
    made, shared = _copy(old), old.spec.block[-2]
    for at in range(begin - begin % shared, end, shared):
        place = cast("QTensor", made.narrow(2, at, shared))
        kept = max(begin - at, 0)
        known = ("in_perm", "in_scale", *(("scale", "zero_point") if kept else ()))
        given: dict[str, Any] = {n: p for n, p in place.parts.items() if n in known}
        block = quantize_values(exact[:, :, at : at + shared].contiguous(), old.spec, **given)
        for (name, to), (_, leaf) in zip(place.leaves(), block.leaves(), strict=True):
            if name == "qdata":
                to[:, :, kept:].copy_(leaf[:, :, kept:])
            elif not kept:
                to.copy_(leaf)
    return made


#: what `Op.trials` returns
ENCODE_TOKENS = _EncodeTokens()
