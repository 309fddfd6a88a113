"""Part of `KernelSuite`: the op `search_scales`, against what the reference finds, by errors in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ao_core.numerics import choose_qparams, scale_to_float, zero_to_float
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.scales.exact import exact_errors
from ao_core.scales.rows import GAIN, QParams, Rows
from ao_core.scales.search import SearchPlan, search_scales
from ao_core.scales.stored import rounded_scale, rounded_zero
from ao_core.spec import ROW, Spec
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_sums import MatrixTrial
from ao_core.testing.trials import KernelCase

__all__ = ["SEARCH_SCALES"]

_FORMATS = (
    *(("int4", zero, "bfloat16") for zero in ("none", "int", "float")),
    *(("uint3", zero, "float32") for zero in ("int", "offset")),
    *(("int8", zero, "float16") for zero in ("none", "offset")),
    *((name, "none", "float32") for name in ("f4e2m1", "f8e4m3", "nf4", "ternary")),
)
_COARSE = (1.1, 0.9, 0.8, 0.65, 0.5, 0.3)
_FINE = (0.93, 0.97, 0.99, 1.01, 1.03, 1.06, -1.0, *(0.9 + 0.02 * i for i in range(12)))


class _SearchScales(MatrixTrial):
    """A batch is what rows hold."""

    specs = tuple(Spec(name, ROW, scale, zero) for name, zero, scale in _FORMATS)
    shapes = ((16, 64), (1, 1), (3, 7), (5, 257))
    batches = ("gaussian", "not finite")

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        spec, fmt = case.spec, registry.dtypes.get(case.spec.dtype)
        x = gaussian(case.shape, seed=seed, device=case.device).to(case.dtype)
        if batch == "not finite":
            x[0, 0] = torch.nan
            x[-1, -1] = torch.inf
            x[case.shape[0] // 2] = 0.0
        grids = choose_qparams(x, fmt, spec.block, spec.zero_point, str(spec.scale_dtype))
        scale, point = scale_to_float(grids[0]), None
        if grids[1] is not None:
            point = zero_to_float(grids[1], fmt)
            point = point / scale if spec.zero_point == "offset" else point
        importance = gaussian(case.shape, seed=seed + 1, device=case.device).abs()
        signed = fmt.kind == "int" and point is None
        fine = tuple(f for f in _FINE if f > 0 or signed)
        ends = (_COARSE, _COARSE if point is None else tuple(reversed(_COARSE)))
        for weights, power, gain in (
            (None, None, GAIN),
            (importance, None, 0.0),
            (None, 0.7, GAIN),
        ):
            plan = SearchPlan((ends, (fine, fine)), 2, gain, power)
            args = (x, scale, point, weights, plan, spec)
            rows = Rows(x, fmt, spec, QParams(scale, point), weights, gain, power)
            yield args, (rows, QParams(*search_scales(*args)[:2]))

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        rows, wanted = expected
        scale, point, better = actual
        found = QParams(scale, point)
        for each in (scale, *([] if point is None else [point])):
            assert (each.dtype, each.shape) == (torch.float32, (case.shape[0], 1))
        (square, measure), (before, _), (_, other) = (
            exact_errors(rows, q) for q in (found, rows.start, wanted)
        )
        good = before.isfinite()
        size = scale.abs()
        stored = rounded_scale(size, str(case.spec.scale_dtype))
        assert torch.equal(stored[good], size[good]), "a scale that the format does not store"
        if point is not None:
            again = rounded_zero(point.clone(), size, rows.dtype, case.spec)
            near = torch.isclose(again, point, rtol=1e-6, atol=1e-6)
            assert bool(near[good].all()), "a zero point that the format does not store"
        kept = torch.isclose(scale, rows.start.scale, rtol=0.0, atol=0.0, equal_nan=True)
        assert bool(kept[~good].all()), "a row that is not finite was changed"
        assert bool((square <= before * (1 + 1e-4) + 1e-12)[good].all()), "worse than the start"
        assert (better.dtype, better.shape) == (torch.bool, scale.shape)
        assert bool((square < before)[better].all()), "better without doubt, and is not"
        worse = measure > 1.25 * other + 1e-9
        assert not bool((worse & good).any()), f"{int((worse & good).sum())} rows are much worse"
        total, right = (float(each[good].sum()) for each in (measure, other))
        assert total <= 1.02 * right + 1e-9, (
            f"the measure adds up to {total}, the reference's to {right}"
        )

    def same(self, a: Any, b: Any) -> bool:
        """Zero points may be None."""
        return super().same(*(tuple(t for t in each if t is not None) for each in (a, b)))

    def out_dtype(self, case: KernelCase) -> torch.dtype:
        return torch.float32

    def odd_calls(self, call: Any) -> Iterator[Any]:
        """Scales in another dtype, too."""
        yield from super().odd_calls(call)
        if isinstance(call, Call):
            spec = Spec(call.spec.dtype, ROW, "e8m0")
            yield Call(
                "search_scales", spec, call.weight_shape, call.x_shape, call.x_dtype, call.device
            )


SEARCH_SCALES = _SearchScales()
