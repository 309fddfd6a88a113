"""Half-quadratic quantization (Badri & Shaji 2023): scales and zero points for errors with few outliers."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ao_core.records import DType
from ao_core.scales.pieces import improve_qparams
from ao_core.scales.rows import QParams, Rows
from ao_core.scales.search import improved
from ao_core.spec import Spec

__all__ = ["hqq_qparams"]

#: exponent of the norm; below 1 it lets few elements be far off so that many are near
_P = 0.7


def hqq_qparams(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the least sum of |error|**0.7 over each block, found by a search.

    The paper minimizes |W - Q(W)|_p^p by half-quadratic splitting: a proximal step of the norm for an
    auxiliary error, in turn with a least-squares fit of the zero point, while the scale stays. Here both
    are searched for, as `mse_qparams` does, with the norm as what is made small. It counts errors along
    the weights as `ao_core.scales.rows.measured` does: the p-norm alone is least for scales that
    shorten the weights, which the paper's fixed scale does not allow. Of all candidates the least is
    kept, among those whose squared error is not above that of absmax. Errors are measured in units of
    the scales, so that the result does not depend on the unit of the weights.

    Reference: Badri & Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

    Args:
        x: of the layout's blocked shape.
        dtype: the number format, of any kind.
        spec: block, storage of scales, kind of zero points and options are used.

    Returns:
        As `choose_qparams`.
    """
    return improve_qparams(x, dtype, spec, _improve)


def _improve(rows: Rows) -> QParams:
    return improved(replace(rows, power=_P))
