"""Matmuls with a `QTensor` after its input steps, and the problem that is left then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.steps import LOW_RANK, Step
from ao_core.tensor.input_steps import step_names, step_weight, stepped

if TYPE_CHECKING:
    from ao_core.layouts import Parts
    from ao_core.tensor.qtensor import QTensor

__all__ = [
    "grouped_linear_after_steps",
    "linear_after_steps",
    "step_rows",
    "stepped_problem",
    "without_steps",
]


def without_steps(w: QTensor, count: int) -> QTensor:
    """The stored weight W S⁻¹ after the first `count` steps, around the same parts; kept with `w`."""
    key = ("input steps", count)
    found: QTensor | None = w._bound.get(key)
    if found is None or any(getattr(found, n) is not getattr(w, n) for n in found.part_names):
        spec = replace(w.spec, input=w.spec.input[count:])
        gone = set(step_names(w.spec)).difference(step_names(spec))
        parts = {name: part for name, part in w.parts.items() if name not in gone}
        found = w._bound[key] = w.like(parts, spec=spec)
    return found


def step_rows(x: Tensor, w: QTensor, count: int | None = None) -> Tensor:
    """Activations (..., K) of a weight (N, K) after its first `count` input steps, or all of them."""
    return stepped(x, w.spec.input[:count], _row_parts(w))


def _row_parts(w: QTensor) -> Parts:
    """The parts of a weight (N, K) that one row of activations goes through."""
    parts = {name: getattr(w, name) for name in step_names(w.spec)}
    return {n: part.reshape(-1) if n.startswith("in_") else part for n, part in parts.items()}


def stepped_problem(
    weight: Tensor, hessians: Sequence[Tensor], w: QTensor
) -> tuple[Tensor, list[Tensor]]:
    """Matrices W S⁻¹ and S H Sᵀ, for algorithms that choose what is stored of a weight.

    Args:
        weight: (E, N, K), the logical matrices.
        hessians: of each matrix, Σ x xᵀ (K, K) in float64.
        w: a weight in the format, in its stored order; those of several matrices have no steps with parts.
    """
    if not w.spec.input:
        return weight, list(hessians)
    values = step_weight(weight.reshape(w.stored_shape), w.spec, w.parts)
    turned = [step_rows(step_rows(h, w).t(), w) for h in hessians]
    return values.reshape(weight.shape), turned


def _split(steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], tuple[Step, ...]] | None:
    """The steps before and after the one of low rank, if there is one."""
    kinds = [step.kind for step in steps]
    if LOW_RANK not in kinds:
        return None
    place = kinds.index(LOW_RANK)
    return steps[:place], steps[place + 1 :]


def _linear(
    fn: Callable[..., Tensor], count: int, x: Tensor, w: QTensor, bias: Tensor | None
) -> Tensor:
    stored, steps = without_steps(w, count), w.spec.input[:count]
    if (parts := _split(steps)) is None:
        return fn(step_rows(x, w, count), stored, bias)
    own = _row_parts(w)
    x = stepped(x, parts[0], own)
    out = fn(stepped(x, parts[1], own), stored, bias)
    a, b = (own[name].to(x.dtype) for name in ("low_rank_a", "low_rank_b"))
    return out + F.linear(F.linear(x, a), b)


def _grouped_linear(
    fn: Callable[..., Tensor], count: int, x: Tensor, w: QTensor, offs: Tensor | None
) -> Tensor:
    stored, steps = without_steps(w, count), w.spec.input[:count]
    experts = _experts_of(x, w, offs)
    own = _expert_parts(w, experts)
    if (parts := _split(steps)) is None:
        return fn(stepped(x, steps, own), stored, offs)
    x = stepped(x, parts[0], own)
    out = fn(stepped(x, parts[1], own), stored, offs)
    return out + _low_rank_of_experts(x, w, experts)


def _experts_of(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor | None:
    """Whose each row of x (M, K) is, as `offs` says; for rows behind those of the last expert, E."""
    if offs is None or not w.shape[0]:
        return None
    rows = torch.arange(x.shape[0], device=x.device, dtype=offs.dtype)
    return torch.searchsorted(offs, rows, right=True)


def _expert_parts(w: QTensor, experts: Tensor | None) -> Parts:
    """The parts that rows go through: x (E, M, K), or (M, K) with rows of experts."""
    parts = {name: getattr(w, name) for name in step_names(w.spec)}
    if experts is None:
        return parts
    # rows behind those of the last expert are multiplied by nothing
    there = experts.clamp(max=w.shape[0] - 1)
    return {
        n: part.squeeze(1).index_select(0, there) if n.startswith("in_") else part
        for n, part in parts.items()
    }


def _low_rank_of_experts(x: Tensor, w: QTensor, experts: Tensor | None) -> Tensor:
    """B A x of each expert. Rows are multiplied by the A of all; what others make of them is left out."""
    a, b = (w.parts[name].to(x.dtype) for name in ("low_rank_a", "low_rank_b"))
    if experts is None:
        return x @ a.mT @ b.mT
    count, rank = a.shape[:2]
    own = torch.arange(count, device=x.device) == experts[:, None]
    inner = (x @ a.flatten(0, 1).t()).unflatten(-1, (count, rank)) * own[..., None]
    return inner.flatten(-2) @ b.transpose(0, 1).flatten(1).t()  # type: ignore[no-any-return]


def linear_after_steps(fn: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """A kernel of the op "linear" with so many of the first input steps taken before it."""
    return partial(_linear, fn, count)


def grouped_linear_after_steps(fn: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """The same for a kernel of the op "grouped_linear"."""
    return partial(_grouped_linear, fn, count)
