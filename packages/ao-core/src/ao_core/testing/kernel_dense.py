"""Part of `KernelSuite`: the op `dense_linear`, against the matmul in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ao_core.invariant import DenseCall
from ao_core.records import Kernel, OpCall
from ao_core.spec import Spec
from ao_core.testing.base import gaussian
from ao_core.testing.trials import KernelCase, OpTrial

__all__ = ["DENSE_LINEAR"]


class _DenseLinear(OpTrial):
    """A shape is that of the weight (N, K); all operands are dense."""

    shapes = ((16, 64), (33, 330), (1, 7))

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        """None is quantized."""
        return [()]

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        return DenseCall(case.dtype, case.device, op)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        n, k = case.shape
        sizes = ((*batch, k), (n, k), (n,))
        made = [
            gaussian(size, seed=3 * seed + i, device=case.device).to(case.dtype)
            for i, size in enumerate(sizes)
        ]
        x, weight, bias = made
        expected = x.double() @ weight.double().T
        yield (x, weight, None), expected
        yield (x, weight, bias), expected + bias.double()


DENSE_LINEAR = _DenseLinear()
