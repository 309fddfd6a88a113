"""Part of `KernelSuite`: the op `hadamard`, against the matmul with the matrix in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ao_core.layouts import Layout
from ao_core.numerics import hadamard_matrix
from ao_core.records import Call
from ao_core.spec import Spec
from ao_core.tensor.rotation import hadamard_spec
from ao_core.testing.base import gaussian
from ao_core.testing.trials import KernelCase, OpTrial

__all__ = ["HADAMARD", "transformed"]


class _Hadamard(OpTrial):
    """The block of a spec is that of the transform; a batch is whether it is the inverse."""

    #: powers of two beside the width of vectors, and orders that have other factors
    specs = tuple(map(hadamard_spec, (1, 2, 8, 16, 64, 512, 4096, 12, 24, 40, 144, 320, 688)))
    shapes = ((16, 64), (33, 120), (3, 5, 144), (0, 64), (48,), (2, 4096), (2, 1376), (5, 640))
    batches = (False, True)

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        if layout.name != "plain":
            return ()
        return [spec for spec in specs if shape[-1] % spec.block[-1] == 0]

    def call(self, op: str, case: KernelCase, batch: Any) -> Call | None:
        return Call(op, case.spec, case.shape, case.shape, case.dtype, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        block = case.spec.block[-1]
        x = gaussian(case.shape, seed=seed, device=case.device).to(case.dtype)
        yield (x, block, batch), transformed(x, block, batch)


def transformed(x: Tensor, block: int, inverse: bool) -> Tensor:
    """The matmul with the dense matrix, in float64."""
    matrix = hadamard_matrix(block).to(x.device).double() / math.sqrt(block)
    blocks = x.double().reshape(-1, block) if x.numel() else x.double()
    matmul = blocks @ (matrix if inverse else matrix.T) if x.numel() else blocks
    return matmul.reshape(x.shape)


HADAMARD = _Hadamard()
