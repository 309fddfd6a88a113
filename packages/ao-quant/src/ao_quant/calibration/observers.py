"""Observers: running statistics of activations, and the range that follows from them.

A state is an immutable record; `observe` gives the one after another batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import WHOLE, DType, Spec
from ao_core.ext import QuantizationError, registry
from ao_core.ext.kernels import static_qparams_of_range
from ao_core.ext.numerics import dequantize_affine, qparams_of_range, quantize_affine
from ao_quant.calibration.histogram import Histogram, added, count_bins, points, quantile

__all__ = [
    "OBSERVERS",
    "Observed",
    "Observer",
    "Range",
    "merged",
    "observe",
    "qparams",
]

#: factors by which the least squared error is searched, as powers of two: first and second round
_COARSE = tuple(-step / 4 for step in range(41))
_FINE = tuple(-step / 32 for step in range(-7, 8))


class Range(NamedTuple):
    """Least and greatest value."""

    low: float
    high: float


_NOTHING = Range(inf, -inf)


@dataclass(frozen=True)
class Observed:
    """What is known of the activations of a layer; nothing seen yet by default."""

    range: Range = _NOTHING
    #: values that were seen
    count: int = 0
    #: None: only the range is observed
    histogram: Histogram | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the state: 24 bytes, and 64 KiB of a histogram."""
        return 24 + (0 if self.histogram is None else self.histogram.nbytes)


class Observer(NamedTuple):
    """A way to find the range of activations."""

    start: Callable[[], Observed]
    #: (state, number format, kind of zero point, percentile) -> the range that codes are to span
    span: Callable[[Observed, DType, str, float], Range]


def observe(state: Observed, x: Tensor) -> Observed:
    """The state after another batch.

    Raises:
        QuantizationError: it has NaN or inf, or values beyond float32.
    """
    x = x.detach().to(torch.float32) if x.dtype == torch.float64 else x.detach()
    if x.numel() == 0:
        return state
    low, high = (float(extreme) for extreme in torch.aminmax(x))
    if not (-inf < low and high < inf):  # NaN is neither
        bad = x.numel() - int(torch.isfinite(x).sum())
        raise QuantizationError(f"{bad} of {x.numel()} values are NaN or inf")
    seen = Range(min(state.range.low, low), max(state.range.high, high))
    histogram = state.histogram
    if histogram is not None:
        histogram = count_bins(histogram, x, max(-low, high))
    return Observed(seen, state.count + x.numel(), histogram)


def merged(a: Observed, b: Observed) -> Observed:
    """The state of what both saw, as if `b` had been observed after `a`."""
    histogram = None
    if a.histogram is not None and b.histogram is not None:
        histogram = added(a.histogram, b.histogram)
    low, high = min(a.range.low, b.range.low), max(a.range.high, b.range.high)
    return Observed(Range(low, high), a.count + b.count, histogram)


def qparams(
    state: Observed, observer: Observer, act: Spec, percentile: float
) -> tuple[float, int | None]:
    """Scale and zero point, if the format has one, of activations that were observed."""
    dtype = registry.dtypes.get(act.dtype)
    span = observer.span(state, dtype, act.zero_point, percentile)
    low, high = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in span)
    scale, point = static_qparams_of_range(low, high, act)
    return float(scale), None if point is None else int(point)


def _all(state: Observed, dtype: DType, zero_point: str, percentile: float) -> Range:
    return state.range


def _share(state: Observed, dtype: DType, zero_point: str, percentile: float) -> Range:
    """The middle of the values, or the least magnitudes; all of them where those are all 0."""
    histogram, share = _histogram(state), percentile / 100
    if zero_point == "none":
        reach = quantile(histogram, share, magnitude=True)
        low, high = -reach, reach
    else:
        tail = (1 - share) / 2
        low, high = quantile(histogram, tail), quantile(histogram, 1 - tail)
    inside = Range(max(low, state.range.low), min(high, state.range.high))
    return inside if low < 0 or high > 0 else state.range


def _least_error(state: Observed, dtype: DType, zero_point: str, percentile: float) -> Range:
    """The range of least squared error among the whole one and shares of it."""
    values, weights = points(_histogram(state))
    values = values.clamp(*state.range).float()

    def errors(spans: Tensor) -> Tensor:
        low, high = spans.unsqueeze(-1).unbind(1)
        scale, point = qparams_of_range(low, high, dtype, zero_point)
        many = values.expand(len(spans), -1).contiguous()
        codes = quantize_affine(many, dtype, (1, WHOLE), scale, point)
        wrong = dequantize_affine(codes, dtype, (1, WHOLE), scale, point) - many
        return wrong.double().square() @ weights

    low, high = state.range
    if zero_point == "none":
        reach = max(-low, high)
        return Range(*_shrunk(errors, (-reach, reach), (True, True)))
    span = (low, high)
    for ends in ((False, True), (True, False)) * 2:  # one after the other, and once more
        span = _shrunk(errors, span, ends)
    return Range(*span)


def _shrunk(
    errors: Callable[[Tensor], Tensor], span: tuple[float, float], ends: tuple[bool, bool]
) -> tuple[float, float]:
    """The span with the least error of those whose marked ends are nearer to 0, by up to 2**-10."""
    whole = torch.tensor(span, dtype=torch.float32, device="cpu")
    moves = torch.tensor(ends, device="cpu")

    def best(factors: Tensor) -> int:
        return int(errors(torch.where(moves, whole * factors[:, None], whole)).argmin())

    coarse = 2.0 ** torch.tensor(_COARSE, device="cpu")
    fine = (coarse[best(coarse)] * 2.0 ** torch.tensor(_FINE, device="cpu")).clamp(max=1.0)
    low, high = torch.where(moves, whole * fine[best(fine)], whole).tolist()
    return low, high


def _histogram(state: Observed) -> Histogram:
    assert state.histogram is not None
    return state.histogram


def _with_histogram() -> Observed:
    return Observed(histogram=Histogram.empty())


#: by the name that a configuration has for it
OBSERVERS: dict[str, Observer] = {
    "minmax": Observer(Observed, _all),
    "percentile": Observer(_with_histogram, _share),
    "mse": Observer(_with_histogram, _least_error),
}
