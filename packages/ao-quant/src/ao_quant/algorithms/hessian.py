"""The factor of a Hessian's inverse, and the order of its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.ext import QuantizationError

__all__ = ["inverse_factor", "order_of"]

#: the most that is added, as a share of the mean of the diagonal
_MOST = 1.0


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """Upper U with Uᵀ U the inverse of the damped matrix, and the damping that was needed.

    Row i of U, over its first element, says how the columns after i make up for a change of column i.

    Args:
        hessian: (K, K) float64, Σ x xᵀ.
        damping: share of the mean of its diagonal that is added; ten times as much where there is no factor.

    Raises:
        QuantizationError: there is none with the most damping either.
    """
    mean = float(hessian.diagonal().mean())
    eye = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    while True:
        # inputs that are all 0 leave nothing to make up for
        damped = hessian + (damping * mean or 1.0) * eye
        # turned around, so that the factor of the inverse is the inverse of a triangular matrix
        turned, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not int(failed):
            upper = turned.flip(0, 1)
            return torch.linalg.solve_triangular(upper, eye, upper=True), damping
        if damping >= _MOST:
            raise QuantizationError(
                f"the Hessian of its inputs has no inverse, not even with damping={damping!r}; use more data"
            )
        damping = min(10 * damping, _MOST)


def order_of(name: str, squares: Tensor, group_of: Tensor) -> Tensor:
    """The order in which columns are rounded.

    Args:
        name: one of `ORDERS`.
        squares: (K,), Σ x² of each column.
        group_of: (K,), the group that each column is in.
    """
    if name == "natural":
        return torch.arange(len(squares), device=squares.device)
    falling = squares.argsort(descending=True, stable=True)
    if name == "activations":
        return falling
    most = torch.zeros(int(group_of.max()) + 1, dtype=squares.dtype, device=squares.device)
    most.scatter_reduce_(0, group_of.long(), squares, "amax")
    groups = most.argsort(descending=True, stable=True).argsort()  # group -> its place
    return falling[groups[group_of[falling].long()].argsort(stable=True)]
