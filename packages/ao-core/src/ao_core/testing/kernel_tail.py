"""Trials of the op "write_tail": bit for bit, and nothing else is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ao_core.records import Kernel, OpCall
from ao_core.tensor.tail import WriteTailCall
from ao_core.testing.base import gaussian
from ao_core.testing.trials import KernelCase, OpTrial, strided_variants

__all__ = ["WRITE_TAIL"]

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
