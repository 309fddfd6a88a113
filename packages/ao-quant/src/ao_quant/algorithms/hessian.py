"""How much a Hessian is damped, and the order of its columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ao_core.ext import QuantizationError
from ao_core.ext.calibration import inverse_factor

__all__ = ["damped_factor", "fitted", "order_of", "ordered_factor"]

#: the most that is added, as a share of the mean of the diagonal
_MOST = 1.0


def damped_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """`inverse_factor` with as much damping as it needs, and how much that was.

    Args:
        hessian: (K, K) float64, Σ x xᵀ.
        damping: share of the mean of its diagonal that is added; ten times as much where there is no factor.

    Raises:
        QuantizationError: there is none with the most damping either.
    """
    while (factor := inverse_factor(hessian, damping)) is None:
        if damping >= _MOST:
            raise QuantizationError(
                f"the Hessian of its inputs has no inverse, not even with damping={damping!r}; use more data"
            )
        damping = min(10 * damping, _MOST)
    return factor, damping


#: Hessian -> (order, damping) and what `ordered_factor` found last: queries, keys and values share it
_LAST: WeakIdKeyDictionary = WeakIdKeyDictionary()


def ordered_factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor, float]:
    """`damped_factor` of a Hessian with its columns in an order.

    Weights of the same inputs have the same Hessian, which is factored once: the last factor is kept as long
    as the Hessian is.
    """
    wanted = (tuple(order.tolist()), damping)
    if hessian not in _LAST or _LAST[hessian][0] != wanted:
        _LAST[hessian] = wanted, damped_factor(hessian[order][:, order], damping)
    return _LAST[hessian][1]  # type: ignore[no-any-return]


def fitted(weight: Tensor, hessian: Tensor, cross: Tensor, damping: float) -> tuple[Tensor, float]:
    """The weight whose outputs for inputs x are nearest to W x̃, and the damping that was used.

    W + W (G - H) (H + λ)⁻¹ is the least of ‖W x̃ - V x‖² + λ ‖W - V‖² over all rows. It is W where G = H.

    Args:
        weight: W (N, K).
        hessian: H = Σ x xᵀ (K, K) float64.
        cross: G = Σ x̃ xᵀ (K, K) float64.
        damping: λ as a share of the mean of H's diagonal.

    Returns:
        (N, K) float64.
    """
    order = torch.arange(len(hessian), device=hessian.device)
    factor, used = ordered_factor(hessian, order, damping)
    wide = weight.double()
    return wide + wide @ (cross - hessian) @ factor.t() @ factor, used


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
