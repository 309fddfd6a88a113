"""How kernels of the op "encode_trellis" are tested: they find the codes of the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core import Kernel, Spec
from ao_core.ext.numerics import encode_trellis
from ao_core.testing import KernelCase, OpTrial
from ao_quant.trellis.op import EncodeTrellisCall

__all__ = ["ENCODE_TRELLIS"]


class _EncodeTrellis(OpTrial):
    """A shape is (rings, places); a batch is the number of bits, and how many places do not matter."""

    specs = ()
    shapes = ((3, 128), (1, 12), (0, 128), (5, 40))
    dtypes = (torch.float32,)
    batches = ((2, 0), (3, 0), (4, 0), (2, 11), (3, 5), (4, 12))

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        return [()]

    def call(self, op: str, case: KernelCase, batch: Any) -> EncodeTrellisCall:
        return EncodeTrellisCall(case.shape, batch[0], case.device)  # type: ignore[arg-type]

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        bits, free = batch
        x = torch.randn(case.shape, generator=torch.Generator().manual_seed(seed)) * 1.3
        if x.numel():
            x[0, 3], x[-1, 5], x[-1, 7] = torch.nan, 1e30, -torch.inf
        count = case.shape[1] - free
        yield (x.to(case.device), bits, count), encode_trellis(x, bits, count)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        assert actual.dtype == torch.uint8
        assert torch.equal(actual.cpu(), expected)

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        x: Tensor = args[0]
        yield (x.t().contiguous().t(), *args[1:])


ENCODE_TRELLIS = _EncodeTrellis()
