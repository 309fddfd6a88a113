"""GPTQ, importance-weighted scales and AWQ as pure functions of a weight and of statistics of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from ao_core import Layout, QTensor, Skip, Solved, Target
from ao_core.ext import is_conv, is_transposed, registry
from ao_core.ext.calibration import Statistics, matrices, output_error
from ao_core.ext.quantizing import grid_of, regridded
from ao_quant.algorithms.applying import (
    nearest,
    scaled,
    unweighable_reason,
    weighed,
)
from ao_quant.algorithms.gptq import gptq
from ao_quant.algorithms.hessian import order_of, ordered_factor
from ao_quant.configs import GGUFWeightOnlyConfig
from ao_quant.configs.algorithms import (
    AWQConfig,
    BaseConfig,
    GPTQConfig,
    ImatrixConfig,
    SmoothQuantConfig,
)

__all__ = [
    "refuses",
    "refuses_gptq",
    "refuses_scaling",
    "solve_awq",
    "solve_gptq",
    "solve_imatrix",
    "solve_smoothquant",
]

_Seen = tuple[Statistics, ...]
#: the least factor of a column
_LEAST = 1e-4
#: the least range of a channel, of activations or weights
_TINY = 1e-5


def solve_gptq(weight: Tensor, seen: _Seen, config: GPTQConfig, target: Target) -> Solved | Skip:
    """`Algorithm.solve` of `GPTQConfig`."""
    hessians = [each["hessian"] for each in seen]
    squares = torch.stack([each.diagonal() for each in hessians])
    if config.importance and unweighable_reason(weight, config.weights, target) is None:
        found = weighed(weight, config.weights, target, squares)
    else:
        found = nearest(weight, config.base, target)
    if isinstance(found, Skip):
        return found
    turned = is_transposed(target)
    q: QTensor = found.t() if turned else found  # type: ignore[assignment]
    grid = grid_of(q)
    blocks, codes = grid.block_of.reshape(weight.shape), []
    damping = 0.0
    for matrix, hessian, block_of in zip(weight, hessians, blocks, strict=True):
        order = order_of(config.order, hessian.diagonal(), block_of[0])
        factor, used = ordered_factor(hessian, order, config.damping)
        rounded, _ = gptq(matrix[:, order], factor, grid, block_of[:, order])
        codes.append(torch.empty_like(rounded).index_copy_(1, order, rounded))
        damping = max(damping, used)
    new = regridded(q, torch.stack(codes))
    values: Tensor = new.t() if turned else new
    return Solved(values, config.base, damping=damping, note=_few(seen, weight))


def solve_imatrix(
    weight: Tensor, seen: _Seen, config: ImatrixConfig, target: Target
) -> Solved | Skip:
    """`Algorithm.solve` of `ImatrixConfig`."""
    squares = torch.stack([each["squares"] for each in seen])
    found = weighed(weight, config.weights, target, squares)
    return found if isinstance(found, Skip) else Solved(found, config.base)


def solve_awq(weight: Tensor, seen: _Seen, config: AWQConfig, target: Target) -> Solved | Skip:
    """`Algorithm.solve` of `AWQConfig`."""
    sizes = torch.stack([each["abs_sums"] / max(each.rows, 1) for each in seen])
    hessians = [each["hessian"].float() for each in seen]  # candidates are compared
    best, least = nearest(weight, config.base, target), inf
    if isinstance(best, Skip):
        return best
    for step in range(config.steps + 1):
        candidate: QTensor | Skip = best
        if step:
            factors = sizes.clamp(min=_LEAST) ** (step / config.steps)
            middle = (factors.amax(-1, keepdim=True) * factors.amin(-1, keepdim=True)).sqrt()
            candidate = scaled(weight, config.weights, target, factors / middle)
        assert isinstance(candidate, QTensor)
        change = matrices(candidate.dequantize(torch.float32), target) - weight
        error = sum(output_error(delta, each) for delta, each in zip(change, hessians, strict=True))
        if error < least:
            best, least = candidate, error
    return Solved(best, config.base, note=_few(seen, weight))


def solve_smoothquant(
    weight: Tensor, seen: _Seen, config: SmoothQuantConfig, target: Target
) -> Solved | Skip:
    """`Algorithm.solve` of `SmoothQuantConfig`."""
    inputs = torch.stack([each["abs_max"] for each in seen]).clamp(min=_TINY)
    columns = weight.abs().amax(1).float().clamp(min=_TINY)
    factors = inputs**config.alpha / columns ** (1 - config.alpha)
    found = scaled(weight, config.weights, target, factors)
    return found if isinstance(found, Skip) else Solved(found, config.base)


def refuses(weight: Tensor, config: BaseConfig, target: Target) -> str | None:
    """Why the base has no format for a weight, if so."""
    found = registry.transform_for(type(config.base)).apply(weight, config.base, target)
    if isinstance(found, Skip):
        return found.reason
    if isinstance(config, ImatrixConfig):
        return unweighable_reason(weight, config.weights, target)
    return None


def refuses_gptq(weight: Tensor, config: GPTQConfig, target: Target) -> str | None:
    """`refuses`, and why its values have no grid."""
    if reason := refuses(weight, config, target):
        return reason
    spec = config.weights.spec(tuple(weight.shape), weight.dtype)
    layout = registry.layouts.get(spec.layout)
    if type(layout).sparsify is not Layout.sparsify:
        return f"the layout {layout.name!r} does not hold all elements"
    if spec.input:
        return f"{spec} has input steps, which its Hessian has not gone through"
    return None


def refuses_scaling(weight: Tensor, config: BaseConfig, target: Target) -> str | None:
    """`refuses`, and where there is no matmul whose activations could be divided."""
    if reason := refuses(weight, config, target):
        return reason
    if is_conv(weight, target) or weight.dim() < 2:
        return "its inputs cannot be scaled before the matmul: it is no matrix"
    if isinstance(config.base, GGUFWeightOnlyConfig):
        return "a GGUF file has no place for the factors of its inputs"
    return None


def _few(seen: Sequence[Statistics], weight: Tensor) -> str:
    columns, rows = weight.shape[-1], min(each.rows for each in seen)
    if rows >= columns:
        return ""
    return f"saw {rows} rows for {columns} columns: only the damping makes its Hessian regular; use more data"
