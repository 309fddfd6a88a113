"""Part of `KernelSuite`: the op `learned_gradients`, against its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ao_core.numerics import block_sum, expand, grid_shape
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_sums import MatrixTrial
from ao_core.testing.trials import KernelCase

__all__ = ["LEARNED_GRADIENTS"]

_NAMES = ("int3", "uint4", "int8", "ternary", "f4e2m1", "f8e5m2", "nf4")


class _LearnedGradients(MatrixTrial):
    """A batch is how far the range reaches, whether there are zero points, and what x holds."""

    specs = tuple(
        Spec(name, block) for name in _NAMES for block in ((1, 32), (1, 24), (1, WHOLE), (2, 16))
    )
    shapes = ((4, 96), (1, 1), (3, 7), (2, 600))
    batches = ((0.0, False, "gaussian"), (0.5, True, "gaussian"), (0.0, True, "not finite"))

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        reach, has_zero_point, kind = batch
        fmt = registry.dtypes.get(case.spec.dtype)
        x = gaussian(case.shape, seed=seed, device=case.device).to(case.dtype)
        if kind == "not finite":
            x[0, 0] = torch.nan
            x[-1, -1] = -torch.inf
        grid = grid_shape(case.shape, case.spec.block)
        size = gaussian(grid, seed=seed + 1, device=case.device)
        scale = (0.3 + size.abs()).copysign(size) * (1.5 / max(fmt.max, -fmt.min))
        point = gaussian(grid, seed=seed + 2, device=case.device) if has_zero_point else None
        for dtype in {case.dtype: None, torch.float32: None}:
            grad = gaussian(case.shape, seed=seed + 3, device=case.device).to(dtype)
            args = (x, grad, scale, point, reach, case.spec)
            yield args, _gradients(*args)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        through, sums = actual
        wanted, (right, sizes) = expected
        assert through.dtype == wanted.dtype
        assert torch.equal(through, wanted), "other elements are outside"
        assert sums.dtype == torch.float32
        assert sums.shape == right.shape
        good = right.isfinite()
        assert torch.equal(sums.isfinite(), good), "what is not finite is elsewhere"
        wrong = (sums.double() - right).abs() > 1e-5 * sizes + 1e-20
        assert not bool((wrong & good).any()), f"{int((wrong & good).sum())} sums differ"

    def out_dtype(self, case: KernelCase) -> torch.dtype:
        return torch.float32


def _gradients(
    x: Tensor, grad: Tensor, scale: Tensor, zero_point: Tensor | None, reach: float, spec: Spec
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The gradient of x, and each block's sums with those of the magnitudes of what they add up."""
    fmt = registry.dtypes.get(spec.dtype)
    place = x.float() / expand(scale, x.shape, spec.block)
    if zero_point is not None:
        place = place + expand(zero_point, x.shape, spec.block)
    values = fmt.decode(fmt.encode(place)).double()
    outside = (place < fmt.min - reach) | (place > fmt.max + reach)
    wide = grad.double()
    moved = torch.where(outside, values, values - place.double()) * wide
    lost = torch.where(outside, wide, 0.0)
    size = torch.where(outside, values.abs(), values.abs() + place.double().abs()) * wide.abs()
    sums = torch.stack([block_sum(part, spec.block) for part in (moved, lost)])
    sizes = torch.stack([block_sum(part, spec.block) for part in (size, lost.abs())])
    return torch.where(outside, 0.0, grad), (sums, sizes)


LEARNED_GRADIENTS = _LearnedGradients()
