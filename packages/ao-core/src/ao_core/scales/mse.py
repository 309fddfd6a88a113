"""Scales and zero points of least squared error, by a search over shrunk ranges."""

from __future__ import annotations

from torch import Tensor

from ao_core.records import DType
from ao_core.scales.pieces import improve_qparams
from ao_core.scales.search import improved
from ao_core.spec import Spec

__all__ = ["mse_qparams"]


def mse_qparams(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points near the least squared error of each block; no block is worse than absmax.

    The range of a block, which `choose_qparams` covers whole, is shrunk: what lies outside is
    clipped, and the rest has finer steps. The best of some shrunk ranges (with zero points, of each end; for
    integers in two's complement with each sign of the scale) is followed by others near it, and by
    least-squares fits of scale and zero point to the codes. Squared errors are those of
    `ao_core.scales.rows.measured`, in which what all blocks have in common counts more: a change of the
    length of the weights. Errors are those of the float32 values that the stored scales and zero
    points give. The op `search_scales` does it.

    Args:
        x: of the layout's blocked shape.
        dtype: the number format, of any kind.
        spec: block, storage of scales, kind of zero points and options are used.

    Returns:
        As `choose_qparams`.
    """
    return improve_qparams(x, dtype, spec, improved)
