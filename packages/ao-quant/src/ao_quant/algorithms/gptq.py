"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) on a grid of any number format."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.ext.quantizing import Grid

__all__ = ["gptq"]

#: columns whose errors are passed on to all others at once
_BLOCK = 64


def gptq(
    weight: Tensor, factor: Tensor, grid: Grid, block_of: Tensor, block: int = _BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix column by column; what follows makes up for the errors.

    Args:
        weight: (N, K), in the order in which columns are rounded, as are all others.
        factor: (K, K) float64, of `ao_core.ext.calibration.inverse_factor`.
        grid: the values that a weight can take.
        block_of: (N, K) int32, the block of the grid that each weight is in.
        block: columns whose errors are passed on to all others at once; changes no code but for rounding.

    Returns:
        The codes (N, K), of more rows where the layout has codes for those; the squared error of the outputs
        for the damped Hessian, a number: with e = (w - q) / U[i, i] of each weight when its turn comes,
        Σ e² = tr(Δ H Δᵀ); and what each weight w was then, (N, K) float64.
    """
    columns = weight.shape[1]
    new_KN = weight.t().to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    diagonal, rounder = factor.diagonal().tolist(), grid.rounder(block_of)
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        part, inner = new_KN[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(part)
        for i in range(stop - start):
            values = rounder.nearest(part[i], start + i)
            torch.sub(part[i], values, out=errors[i]).div_(diagonal[start + i])
            part[i + 1 :].addr_(inner[i, i + 1 :], errors[i], alpha=-1)
        total += errors.square().sum()
        new_KN[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return rounder.codes(), total, new_KN.t()
