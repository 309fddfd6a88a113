"""GPTQ, Qronos, scales by importance, clipped ranges: functions of a weight and statistics of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import Layout, QTensor, Skip, Solved, Spec, Target
from ao_core.ext import is_conv, is_transposed, registry
from ao_core.ext.calibration import Statistics
from ao_core.ext.quantizing import grid_of, regridded, stepped_problem
from ao_quant.algorithms.applying import clipped, nearest, unweighable_reason, weighed
from ao_quant.algorithms.gptq import gptq
from ao_quant.algorithms.hessian import fitted, order_of, ordered_factor
from ao_quant.configs import ClipConfig
from ao_quant.configs.algorithms import BaseConfig, GPTQConfig, ImatrixConfig, QronosConfig

__all__ = [
    "Swept",
    "few",
    "importance_start",
    "refuses",
    "refuses_gptq",
    "solve_clip",
    "solve_gptq",
    "solve_imatrix",
    "solve_qronos",
    "sweep",
]

_Seen = tuple[Statistics, ...]


class Swept(NamedTuple):
    """What GPTQ makes of a weight."""

    #: rounded to nearest in its stored order, (out, in): scales and zero points
    q: QTensor
    #: (E, N, K)
    codes: Tensor
    #: what each weight was when it was rounded, (E, N, K) float64
    weight: Tensor
    damping: float


def sweep(
    weight: Tensor,
    seen: _Seen,
    config: GPTQConfig,
    target: Target,
    wanted: Tensor | None = None,
) -> Swept | Skip:
    """GPTQ of a weight (E, N, K) on the grid that it has by the configuration.

    `wanted` has the values that are rounded where they are not those of the weight.
    """
    hessians = [each["hessian"] for each in seen]
    values = weight if wanted is None else wanted
    found = importance_start(values.to(weight.dtype), seen, config, target, config.importance)
    if isinstance(found, Skip):
        return found
    grid = grid_of(found)
    blocks, codes, weights = grid.block_of.reshape(weight.shape), [], []
    damping = 0.0
    stored, hessians = stepped_problem(values, hessians, found)
    for matrix, hessian, block_of in zip(stored, hessians, blocks, strict=True):
        order = order_of(config.order, hessian.diagonal(), block_of[0])
        factor, used = ordered_factor(hessian, order, config.damping)
        rounded, _, turns = gptq(matrix[:, order], factor, grid, block_of[:, order])
        codes.append(torch.empty_like(rounded).index_copy_(1, order, rounded))
        weights.append(torch.empty_like(turns).index_copy_(1, order, turns))
        damping = max(damping, used)
    return Swept(found, torch.stack(codes), torch.stack(weights), damping)


def importance_start(
    weight: Tensor, seen: _Seen, config: BaseConfig, target: Target, importance: bool
) -> QTensor | Skip:
    """Rounded to nearest in its stored order, with scales by importance where the format has some."""
    squares = torch.stack([each["hessian"].diagonal() for each in seen])
    if importance and unweighable_reason(weight, config.weights, target) is None:
        found = weighed(weight, config.weights, target, squares)
    else:
        found = nearest(weight, config.base, target)
    turned = is_transposed(target) and not isinstance(found, Skip)
    return found.t() if turned else found  # type: ignore[return-value, union-attr]


def solve_gptq(weight: Tensor, seen: _Seen, config: GPTQConfig, target: Target) -> Solved | Skip:
    """`Algorithm.solve` of `GPTQConfig`."""
    return _solved(weight, seen, config, target, sweep(weight, seen, config, target), ())


def solve_qronos(
    weight: Tensor, seen: _Seen, config: QronosConfig, target: Target
) -> Solved | Skip:
    """`Algorithm.solve` of `QronosConfig`."""
    missing = sum(float(each["unpaired"]) for each in seen)
    if missing:
        note = (
            f"{missing:.0f} of the rows are others than in the model as it was, which chose other experts: "
            "by GPTQ"
        )
        return _solved(weight, seen, config, target, sweep(weight, seen, config, target), (note,))
    fits = [
        fitted(matrix, each["hessian"], each["cross"], config.damping)
        for matrix, each in zip(weight, seen, strict=True)
    ]
    wanted = torch.stack([values for values, _ in fits])
    moved = float((wanted - weight).norm() / weight.double().norm().clamp(min=1e-300))
    found = sweep(weight, seen, config, target, wanted)
    note = f"fitted to the inputs of quantized layers, by which it moved by {moved:.1%} of its size"
    return _solved(weight, seen, config, target, found, (note,) if moved else ())


def _solved(
    weight: Tensor,
    seen: _Seen,
    config: GPTQConfig,
    target: Target,
    found: Swept | Skip,
    notes: Sequence[str],
) -> Solved | Skip:
    if isinstance(found, Skip):
        return found
    new = regridded(found.q, found.codes)
    values: Tensor = new.t() if is_transposed(target) else new
    note = "; ".join(filter(None, (few(seen, weight), *notes)))
    return Solved(values, config.base, damping=found.damping, note=note)


def solve_imatrix(
    weight: Tensor, seen: _Seen, config: ImatrixConfig, target: Target
) -> Solved | Skip:
    """`Algorithm.solve` of `ImatrixConfig`."""
    squares = torch.stack([each["squares"] for each in seen])
    found = weighed(weight, config.weights, target, squares)
    return found if isinstance(found, Skip) else Solved(found, config.base)


def solve_clip(weight: Tensor, seen: _Seen, config: ClipConfig, target: Target) -> Solved | Skip:
    """`Algorithm.solve` of `ClipConfig`."""
    reason = unweighable_reason(weight, config.weights, target)
    spec = config.weights.spec(tuple(weight.shape), weight.dtype)
    if reason is None and (is_conv(weight, target) or any(n != 1 for n in spec.block[:-1])):
        reason = f"{spec} has no scales for parts of a row"
    if reason is None and (isinstance(spec.scale_dtype, Spec) or _is_codebook(spec)):
        reason = f"{spec} has no scales that a range decides alone"
    if reason is not None:
        found = nearest(weight, config.base, target)
        return found if isinstance(found, Skip) else Solved(found, config.base, note=reason)
    found = clipped(
        weight, config.weights, target, [each["hessian"] for each in seen], config.least
    )
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
    if not layout.affine and type(layout).round_column is Layout.round_column:
        return f"the layout {layout.name!r} does not round columns one by one"
    if any(step.kind != "hadamard" for step in spec.input) and weight.dim() > 2:
        return f"{spec} has input steps of each expert"
    return None


def _is_codebook(spec: Spec) -> bool:
    return registry.dtypes.get(spec.dtype).kind == "codebook"


def few(seen: Sequence[Statistics], weight: Tensor) -> str:
    """What is to be said of a weight that saw fewer rows than it has columns; else empty."""
    columns, rows = weight.shape[-1], min(each.rows for each in seen)
    if rows >= columns:
        return ""
    return f"saw {rows} rows for {columns} columns: only the damping makes its Hessian regular; use more data"
