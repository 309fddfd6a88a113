"""What algorithms compute with the Hessian of a weight's inputs, Σ x xᵀ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["best_of_rank", "inverse_factor", "output_error"]

#: rows of a triangular matrix that is inverted at once
_SMALL = 256


def inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """Upper U with Uᵀ U the inverse of the damped matrix; None where it has no inverse.

    Row i of U, over its first element, says how the columns after i make up for a change of column i.

    Args:
        hessian: (K, K) float64, Σ x xᵀ.
        damping: share of the mean of its diagonal that is added to the diagonal.
    """
    mean = float(hessian.diagonal().mean())
    # of the matrix turned around, so that the factor of the inverse is the inverse of a triangular matrix
    turned = hessian.flip(0, 1)
    # inputs that are all 0 leave nothing to make up for
    turned.diagonal().add_(damping * mean or 1.0)
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(turned)
    del turned  # matrices of this size are what calibration needs most memory for
    if int(failed):
        return None
    _invert_lower(lower)
    return lower.flip(0, 1)


def _invert_lower(lower: Tensor) -> None:
    """Put the inverse of a lower triangular matrix in its place.

    By halves, with [[A, 0], [C, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ C A⁻¹, D⁻¹]]: fewer operations than solving for the
    columns of the identity, and no second matrix of its size.
    """
    size = len(lower)
    if size <= _SMALL:
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, eye, upper=False))
        return
    half = size // 2
    first, corner, last = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    _invert_lower(first)
    _invert_lower(last)
    corner.copy_(last @ corner @ first).neg_()


def output_error(change: Tensor, hessian: Tensor) -> float:
    """tr(Δ H Δᵀ) of a change (N, K) of a weight: the squared error of the outputs on the data.

    Args:
        change: float64, or float32 with a Hessian in float32 where a few digits are enough.
        hessian: (K, K), Σ x xᵀ.
    """
    return float(((change @ hessian).mul_(change)).sum(dtype=torch.float64))


def best_of_rank(matrix: Tensor, rank: int, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """B (N, rank) and A (rank, K) whose matmul is nearest to a matrix E (N, K); both have the same norms.

    Nearest by the squared error of the weights or, with the moments R = E[x xᵀ] (K, K) of the inputs x, by
    that of the outputs: trace (E - BA) R (E - BA)ᵀ. Both ways BA = U Uᵀ E, where U holds the first
    eigenvectors of E R Eᵀ (without moments R = 1); in float64. Where the rank is less, the others are zeros.
    """
    wide = matrix.double()
    basis = None
    if wide.shape[0] > wide.shape[1]:  # the same within the space of its columns
        basis, wide = torch.linalg.qr(wide)
    gram = wide @ wide.t() if moments is None else wide @ moments.to(wide) @ wide.t()
    _, vectors = torch.linalg.eigh(gram)
    left = vectors.flip(1)[:, :rank]
    right = left.t() @ wide
    left = left if basis is None else basis @ left
    sizes = right.norm(dim=1).sqrt()
    inverse = torch.where(sizes > 0, 1 / sizes, 0.0)
    missing = rank - left.shape[1]
    b = nn.functional.pad(left * sizes, (0, missing)).float()
    a = nn.functional.pad(right * inverse[:, None], (0, 0, 0, missing)).float()
    return b, a
