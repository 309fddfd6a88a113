"""Half-quadratic quantization (Badri & Shaji 2023): scales and zero points for errors with few outliers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ao_core.numerics.scales.mse import search_range
from ao_core.numerics.scales.rows import QParams, Rows, improve_qparams, merge
from ao_core.records import DType
from ao_core.spec import Spec

__all__ = ["hqq_qparams"]

#: exponent of the norm; below 1 it lets few elements be far off so that many are near
_P = 0.7
#: weight of the quadratic term, in steps of the format, and its growth from step to step
_BETA, _GROWTH = 10.0, 1.2
_ITERATIONS = 20
#: smallest magnitude, in steps, that is raised to a negative power
_TINY = 1e-9


def hqq_qparams(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points by half-quadratic splitting of the sum of |error|**0.7 over each block.

    Minimizing |W - Q(W)|_p^p is split by an auxiliary error E: E = shrink(W - Q(W)), the proximal
    step of the p-norm, in turn with a least-squares fit of the scale and the zero point that take
    codes to W - E. The paper fits the zero point and keeps the scale; here both are fitted, the
    errors are measured in steps of the format so that the result does not depend on the unit of the
    weights, and the start is the better of absmax and the least squared error. Fits and norms count
    errors along the weights as `Rows.errors` does: the p-norm alone is least for scales that shorten
    the weights, which the paper's fixed scale does not allow. Of all iterates the least is kept, among
    those whose squared error is not above that of absmax.

    Reference: Badri & Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

    Args:
        x: of the layout's blocked shape.
        dtype: the number format, of any kind.
        spec: block, storage of scales, kind of zero points and options are used.

    Returns:
        As `choose_qparams`.
    """
    return improve_qparams(x, dtype, spec, _improve)


def _improve(rows: Rows, start: QParams) -> QParams:
    limit, error = rows.errors(start, _P)
    found = start
    current = search_range(rows, start)
    beta = _BETA
    for iteration in range(_ITERATIONS + 1):
        if iteration:
            current = rows.fitted(current, partial(_without_error, rows, beta))
            beta *= _GROWTH
        squared, new = rows.errors(current, _P)
        better = (new < error) & (squared <= limit)
        found, error = merge(better, current, found), torch.where(better, new, error)
    return rows.never_worse(found, start, _P)


def _without_error(rows: Rows, beta: float, x: Tensor, q: QParams) -> Tensor:
    """W - E of a strip: E is the error in steps, each shrunk by |error|**(p - 1) / beta."""
    steps = rows.residual(x, q).div_(q.scale)
    size = steps.abs()
    shrunk = (size - size.clamp(min=_TINY).pow_(_P - 1.0).div_(beta)).clamp_(min=0.0)
    # the residual is Q(W) - W
    return x + shrunk.copysign_(steps).mul_(q.scale)
