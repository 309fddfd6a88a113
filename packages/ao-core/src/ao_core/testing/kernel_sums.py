"""Part of `KernelSuite`: the op `scale_sums`, against what dequantizing gives, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.numerics import dequantize_affine, quantize_affine
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.testing.base import gaussian
from ao_core.testing.trials import KernelCase, OpTrial

__all__ = ["SCALE_SUMS", "MatrixTrial", "dequantized_sums"]

_ROW = (1, WHOLE)
_NAMES = ("int4", "int8", "int2", "uint4", "ternary", "f4e2m1", "f6e3m2", "f8e4m3", "f8e5m2", "nf4")


class MatrixTrial(OpTrial):
    """Of ops over the blocks of a dense matrix; the layout of the spec is the plain one."""

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        """All of them, of matrices in the plain layout."""
        return specs if layout.name == "plain" and len(shape) == 2 else ()

    def call(self, op: str, case: KernelCase, batch: Any) -> Call | None:
        """The dense matrix is both operands."""
        return Call(op, case.spec, case.shape, case.shape, case.dtype, case.device)


class _ScaleSums(MatrixTrial):
    """A batch is a number of candidates, and what rows hold."""

    specs = tuple(
        Spec(name, _ROW, zero_point=zero) for name in _NAMES for zero in ("none", "float")
    )
    shapes = ((16, 64), (1, 1), (3, 7), (2, 600), (5, 257))
    batches = ((1, "gaussian"), (4, "gaussian"), (21, "gaussian"), (16, "not finite"))

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        candidates, kind = batch
        rows, fmt = case.shape[0], registry.dtypes.get(case.spec.dtype)
        x = gaussian(case.shape, seed=seed, device=case.device).to(case.dtype)
        if kind == "not finite":
            x[0, 0] = torch.nan
            x[-1, -1] = torch.inf
            x[rows // 2] = 0.0
        size = gaussian((rows, candidates), seed=seed + 1, device=case.device)
        scale = (0.05 + size.abs()) * (2.0 / max(fmt.max, -fmt.min))
        scale[:, -1] = 0.0
        point = None
        if case.spec.zero_point != "none":
            point = gaussian((rows, candidates), seed=seed + 2, device=case.device)
        importance = gaussian(case.shape, seed=seed + 3, device=case.device).abs()
        for weights, power in ((None, None), (importance, None), (None, 0.7), (importance, 0.7)):
            args = (x, scale, point, weights, power, case.spec)
            yield args, dequantized_sums(*args)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        assert actual.dtype == torch.float32
        assert actual.shape == expected.shape
        assert actual.is_contiguous()
        good = expected.isfinite()
        assert torch.equal(actual[:3].isfinite(), good[:3]), "what is not finite is elsewhere"
        # relative to the sums of a scale of 0, in the last column: errors may be rounding of x alone
        squares, square = expected[0], expected[0, :, -1:]
        mixed, count = (squares * square).sqrt(), 16.0 * case.shape[1]
        sizes = [squares + 0.1 * mixed + 1e-7 * square, mixed + 1e-2 * square]
        sizes.append(((squares + 1e-2 * square) * count).sqrt())
        if len(expected) == 4:
            sizes.append(expected[3] + 10 * expected[3, :, -1:])
        wrong = (actual.double() - expected).abs() > 1e-5 * torch.stack(sizes) + 1e-20
        assert not bool((wrong & good).any()), f"{int((wrong & good).sum())} sums differ"

    def out_dtype(self, case: KernelCase) -> torch.dtype:
        return torch.float32


def dequantized_sums(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    importance: Tensor | None,
    power: float | None,
    spec: Spec,
) -> Tensor:
    """The sums of the op by the numbers that `dequantize_affine` gives, in float64."""
    fmt, columns = registry.dtypes.get(spec.dtype), []
    weights = torch.ones_like(x, dtype=torch.float64) if importance is None else importance.double()
    for c in range(scale.shape[1]):
        by, point = scale[:, c : c + 1], None if zero_point is None else zero_point[:, c : c + 1]
        codes = quantize_affine(x.float(), fmt, _ROW, torch.where(by == 0, 1.0, by), point)
        values = dequantize_affine(codes, fmt, _ROW, by, point)
        error = values.double() - x.double()
        parts = [error.square(), error * x.double(), error]
        parts += [] if power is None else [error.abs().pow(power)]
        columns.append(torch.stack([(part * weights).sum(1) for part in parts]))
    return torch.stack(columns, -1)


SCALE_SUMS = _ScaleSums()
