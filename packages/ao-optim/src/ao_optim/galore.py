"""GaLore (Zhao et al. 2024, arXiv 2403.03507): optimizer state of gradients projected to a low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ao_core.ext import ConfigError, checked
from ao_core.ext.kernels import is_sharded
from ao_optim.optimizers import AdamW8bit
from ao_optim.wrapped import WrappedOptimizer

__all__ = ["GaLore"]


class GaLore(WrappedOptimizer):
    """Any optimizer, whose state for a matrix is that of a projection to its leading singular vectors.

    A matrix (m, n) with m <= n has the stand-in (rank, n), which sees the gradient PᵀG; what the inner
    optimizer does to it, projected back, changes the matrix. P (m, rank) are the leading left singular
    vectors of the gradient, found anew every `update_gap` steps; with m > n likewise from the right.
    Matrices that the rank does not make smaller, and other parameters, are optimized as they are.

    Args:
        params: parameters, or groups of them.
        optimizer: class of the inner optimizer.
        rank: rows or columns that stay.
        update_gap: steps between decompositions.
        scale: factor of what is projected back; the paper's alpha.
        options: of the inner optimizer. `weight_decay` shrinks the whole parameter by lr * weight_decay.

    Raises:
        ValueError: an option cannot be, or a parameter is a `DTensor`, whose rows lie on other ranks.
    """

    extra_names = ("galore_projection", "galore_steps")

    @checked
    def __init__(
        self,
        params: Any,
        optimizer: type[Optimizer] = AdamW8bit,
        *,
        rank: int = 128,
        update_gap: int = 200,
        scale: float = 0.25,
        **options: Any,
    ) -> None:
        own = {"rank": rank, "update_gap": update_gap, "scale": scale}
        super().__init__(params, optimizer, own, **options)

    def stand_in(self, param: Tensor, group: dict[str, Any]) -> nn.Parameter:
        """Zeros of the low rank, which hold one step at a time; or a view of the parameter."""
        _check(group)
        if is_sharded(param):
            raise ValueError(
                "GaLore needs whole gradients, and a DTensor has its rows on other ranks"
            )
        if not _projects(param, group):
            return nn.Parameter(param.detach())
        m, n = param.shape
        shape = (group["rank"], n) if m <= n else (m, group["rank"])
        return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=param.device))

    def check_extras(
        self, param: Tensor, group: dict[str, Any], extras: dict[str, Any], key: Any
    ) -> None:
        """A projection is of the shorter side of its matrix, to the rank."""
        _check(group)
        steps, projection = extras.get("galore_steps", 0), extras.get("galore_projection")
        if type(steps) is not int or steps < 0:
            raise ValueError(f"galore_steps of parameter {key} is {steps!r}; it is a count")
        if projection is None and not steps:
            return
        shape = tuple(projection.shape) if isinstance(projection, Tensor) else projection
        needed = (min(param.shape), group["rank"]) if _projects(param, group) else None
        if shape != needed:
            raise ValueError(
                f"galore_projection of parameter {key} has shape {shape!r}, but the parameter of "
                f"{tuple(param.shape)} at rank={group['rank']} needs {needed}"
            )

    def before(self, param: Tensor, group: dict[str, Any]) -> None:
        """Project the gradient."""
        stand_in, grad = self._stand_ins[param], param.grad
        assert grad is not None
        if not _projects(param, group):
            stand_in.grad = grad
            return
        grad = grad.float()
        kept = self._extras[param]
        count = kept.get("galore_steps", 0)
        if count % group["update_gap"] == 0:
            kept["galore_projection"] = _leading(grad, group["rank"])
        kept["galore_steps"] = count + 1
        projection = kept["galore_projection"]
        wide = param.shape[0] <= param.shape[1]
        stand_in.grad = projection.mT @ grad if wide else grad @ projection
        stand_in.zero_()

    def after(self, param: Tensor, group: dict[str, Any]) -> None:
        """Project the step back; decay the weights, which the stand-in does not know."""
        if not _projects(param, group):
            return
        stand_in = self._stand_ins[param]
        projection = self._extras[param]["galore_projection"]
        wide = param.shape[0] <= param.shape[1]
        change = projection @ stand_in if wide else stand_in @ projection.mT
        value = param.float().mul_(1 - float(group["lr"]) * group.get("weight_decay", 0.0))
        param.copy_(value.add_(change, alpha=group["scale"]))


def _check(group: dict[str, Any]) -> None:
    for name in ("rank", "update_gap"):
        if type(group[name]) is not int or group[name] < 1:
            raise ConfigError(
                f"{name}={group[name]!r} of GaLore must be a whole number of at least 1"
            )


def _projects(param: Tensor, group: dict[str, Any]) -> bool:
    return param.dim() == 2 and min(param.shape) > group["rank"]


def _leading(grad: Tensor, rank: int) -> Tensor:
    """The leading singular vectors of the shorter side: (m, rank) for m <= n, else (n, rank)."""
    # no decomposition of what is not finite
    left, _, right = torch.linalg.svd(grad.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
    shorter: Tensor = left if grad.shape[0] <= grad.shape[1] else right.mT
    return shorter[:, :rank].contiguous()
