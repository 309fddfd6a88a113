"""Input steps of a `QTensor`: their parts, the values of a stepped weight, and matmuls after steps.

See `ao_core.steps` for what a step does. The parts `in_perm` (int32) and `in_scale` (float32) have one entry
for each element of a row of activations, in as many dimensions as the weight: (1, K), or (E, 1, K) where each
expert has its own. Codes and scales know nothing of them, and so no layout does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ao_core.arguments import shown
from ao_core.errors import ConfigError, QuantizationError, UnsupportedOp
from ao_core.layouts import SHARED, Form, Geometry, PartAxis, Parts
from ao_core.numerics import has_hadamard, largest_block
from ao_core.spec import Spec
from ao_core.steps import Step
from ao_core.tensor.checks import check_given

if TYPE_CHECKING:
    from ao_core.tensor.qtensor import QTensor

__all__ = [
    "cannot_cut",
    "cannot_join",
    "grouped_linear_after_steps",
    "identity_steps",
    "linear_after_steps",
    "make_step_parts",
    "misfit",
    "step_axes",
    "step_forms",
    "step_names",
    "step_rows",
    "step_weight",
    "stepped",
    "stepped_problem",
    "stored_spec",
    "unstep_weight",
    "without_steps",
    "wrong_steps",
]

#: kind of step -> its part, and the dtype of that; other kinds have none
_PARTS = {"permute": ("in_perm", torch.int32), "scale": ("in_scale", torch.float32)}


def step_names(spec: Spec) -> tuple[str, ...]:
    """The parts that a tensor of this format has for its input steps, in their order."""
    return tuple(_PARTS[step.kind][0] for step in spec.input if step.kind in _PARTS)


def stored_spec(spec: Spec) -> Spec:
    """The format of the stored values, those of the stepped weight: the same without input steps."""
    return replace(spec, input=()) if spec.input else spec


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *(1,) * (len(shape) > 1), shape[-1])


def step_axes(shape: tuple[int, ...]) -> Geometry:
    """The geometry of these parts: one entry for each column, which all rows of a matrix share."""
    single = PartAxis(1, 1)
    return (*(single,) * (len(shape) - 2), *(SHARED,) * (len(shape) > 1), single)


def step_forms(spec: Spec, shape: tuple[int, ...]) -> dict[str, Form]:
    """What these parts must be, of a tensor of stored `shape`."""
    dtypes = dict(_PARTS.values())
    return {name: Form(_shape(shape), dtypes[name]) for name in step_names(spec)}


def misfit(spec: Spec, shape: tuple[int, ...]) -> str | None:
    """Why the rows of a tensor of this shape cannot go through the steps, if so."""
    k = shape[-1]
    for step in spec.input:
        if step.block and k % step.block:
            return (
                f"the input step {str(step)!r} needs rows in whole blocks, and they have {k} elements; the "
                f"largest block of {k} that has a Hadamard matrix is {largest_block(max(k, 1))}"
            )
        if step.block and not has_hadamard(step.block):
            return (
                f"the input step {str(step)!r}: no construction of a Hadamard matrix of {step.block} is "
                f"known to ao; the largest block of {k} that has one is {largest_block(max(k, 1))}"
            )
    return None


def wrong_steps(parts: Parts) -> str | None:
    """Why parts, of the right forms, are no permutation or hold a scale that cannot be undone, if so."""
    perm, scale = parts.get("in_perm"), parts.get("in_scale")
    if perm is not None and _has_values(perm):
        places = torch.arange(perm.shape[-1], device=perm.device, dtype=perm.dtype)
        if not torch.equal(perm.sort(-1).values, places.expand(perm.shape)):
            return f"in_perm must hold each index from 0 to {perm.shape[-1] - 1} once in each row"
    if scale is None or not _has_values(scale):
        return None
    if bool(scale.isfinite().all()) and not bool((scale == 0).any()):
        return None
    return "in_scale must be finite in float32, and not 0"


def _has_values(part: Tensor) -> bool:
    return type(part) in (Tensor, torch.nn.Parameter) and not part.is_meta


def make_step_parts(
    spec: Spec,
    shape: tuple[int, ...],
    device: torch.device,
    in_perm: Tensor | None,
    in_scale: Tensor | None,
) -> Parts:
    """The parts from what `quantize_tensor` is given: (K,) for all matrices, or (..., K) for each.

    Raises:
        ConfigError: of another shape or dtype, or no permutation, or a scale that is 0 or not finite.
        QuantizationError: values are missing or superfluous, or the rows do not fit the steps.
    """
    given = {"in_perm": in_perm, "in_scale": in_scale}
    names = step_names(spec)
    check_given(
        spec, names, given, "a part of an input step is given where `Spec.input` has the step"
    )
    if spec.input and (reason := misfit(spec, shape)):
        raise QuantizationError(f"a tensor of shape {shape} has no format {spec}: {reason}")
    parts = {
        name: _part(name, given[name], form, device)  # type: ignore[arg-type]
        for name, form in step_forms(spec, shape).items()
    }
    if reason := wrong_steps(parts):
        name = reason.split()[0]
        raise ConfigError(f"{name}={shown(given[name])}: {reason}")
    return parts


def _part(name: str, value: Tensor, form: Form, device: torch.device) -> Tensor:
    floating, value = form.dtype.is_floating_point, value.detach()
    kind = "floating-point" if floating else "integer"
    if value.is_floating_point() != floating or value.is_complex() or value.dtype == torch.bool:
        raise ConfigError(f"{name}={shown(value)} has dtype {value.dtype}; use a {kind} tensor")
    shape = form.shape
    if tuple(value.shape) not in (shape, (*shape[:-2], shape[-1]), shape[-1:]):
        raise ConfigError(
            f"{name}={shown(value)} has the shape {tuple(value.shape)}; use {shape[-1:]}, the same for all "
            f"rows and matrices of the weight, or {shape}"
        )
    if value.dim() > 1 and value.dim() < len(shape):
        value = value.unsqueeze(-2)
    value = value.to(device=device, dtype=form.dtype).expand(shape)
    return value.clone(memory_format=torch.contiguous_format)


def identity_steps(name: str, shape: tuple[int, ...], device: Any) -> Tensor:
    """A part, of its own `shape`, by which its step changes nothing."""
    if name == "in_perm":
        places = torch.arange(shape[-1], dtype=torch.int32, device=device)
        return places.expand(shape).contiguous()
    return torch.ones(shape, dtype=torch.float32, device=device)


def cannot_cut(spec: Spec, start: int, length: int) -> str | None:
    """Why columns from `start` do not go through the steps by themselves, if so; not asked of all columns."""
    for step in spec.input:
        if step.kind == "permute":
            return "the input step 'permute' takes columns to any place"
        if step.block and (start % step.block or length % step.block):
            return f"columns {start} to {start + length} cut through a block of the input step '{step}'"
    return None


def cannot_join(spec: Spec) -> str | None:
    """Why the columns of two weights do not go through the steps side by side, if so."""
    permutes = any(step.kind == "permute" for step in spec.input)
    return "the input step 'permute' is one of all columns" if permutes else None


# -- values ----------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype, steps: tuple[Step, ...]) -> torch.dtype:
    """In what the steps are computed, so that values are rounded once; permuting rounds nothing."""
    exact = all(step.kind == "permute" for step in steps)
    return dtype if exact or dtype == torch.float64 else torch.float32


def _permuted(x: Tensor, perm: Tensor) -> Tensor:
    if perm.numel() == perm.shape[-1]:
        return x.index_select(-1, perm.reshape(-1))
    return x.gather(-1, perm.long().expand(x.shape))


def _inverse(perm: Tensor) -> Tensor:
    places = torch.arange(perm.shape[-1], device=perm.device).expand(perm.shape)
    return torch.zeros_like(places).scatter(-1, perm.long(), places)


def _rotated(x: Tensor, block: int, inverse: bool = False) -> Tensor:
    from ao_core.tensor.rotation import hadamard  # imports torch's compiler

    return hadamard(x, block, inverse=inverse)


def stepped(x: Tensor, steps: tuple[Step, ...], parts: Parts) -> Tensor:
    """S x of activations, in the dtype of x; the parts broadcast over its rows."""
    wide = x.to(_wide(x.dtype, steps))
    for step in steps:
        if step.kind == "permute":
            wide = _permuted(wide, parts["in_perm"])
        elif step.kind == "scale":
            wide = wide * parts["in_scale"]
        else:
            wide = _rotated(wide, step.block)
    return wide.to(x.dtype)


def step_weight(values: Tensor, spec: Spec, parts: Parts) -> Tensor:
    """W S⁻¹ of dense values of the stored shape: what a tensor of this format stores.

    Returns:
        Float64 of float64 values; otherwise float32, or the dtype of the values if they are only permuted.

    Raises:
        QuantizationError: finite values become too large.
        UnsupportedOp: the rows have another length than the steps are for.
    """
    shape = tuple(values.shape)
    reason = misfit(spec, shape)
    for name, form in step_forms(spec, shape).items():
        if tuple(parts[name].shape) != form.shape:
            reason = f"its part {name!r} has the shape {tuple(parts[name].shape)}"
    if reason:
        raise UnsupportedOp(f"values of shape {shape} as {spec}: {reason}")
    wide = values.to(_wide(values.dtype, spec.input))
    for step in spec.input:
        if step.kind == "permute":
            wide = _permuted(wide, parts["in_perm"])
        elif step.kind == "scale":
            wide = wide / parts["in_scale"]
        else:
            wide = _rotated(wide, step.block)
    _check_range(values, wide, spec)
    return wide


def _check_range(values: Tensor, stepped: Tensor, spec: Spec) -> None:
    """Raise where steps take finite values beyond half of what their dtype holds; see `check_quantizable`."""
    if not (_has_values(stepped) and stepped.numel() and values.isfinite().all()):
        return
    limit = torch.finfo(stepped.dtype).max / 2
    if not (greatest := float(stepped.abs().amax())) <= limit:
        raise QuantizationError(
            f"values up to {float(values.abs().amax()):.4g} become {greatest:.4g} by the input steps of "
            f"{spec}, beyond {limit:.4g}; use values of in_scale nearer to 1"
        )


def unstep_weight(
    decode: Callable[[torch.dtype], Tensor], spec: Spec, parts: Parts, dtype: torch.dtype
) -> Tensor:
    """W in `dtype` from W S⁻¹, which `decode` gives in the dtype that it is asked for."""
    wide = decode(_wide(dtype, spec.input))
    for step in reversed(spec.input):
        if step.kind == "permute":
            wide = _permuted(wide, _inverse(parts["in_perm"]))
        elif step.kind == "scale":
            wide = wide * parts["in_scale"]
        else:
            wide = _rotated(wide, step.block, inverse=True)
    return wide.to(dtype)


# -- matmuls ---------------------------------------------------------------------------------------


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
    parts = {name: getattr(w, name).reshape(-1) for name in step_names(w.spec)}
    return stepped(x, w.spec.input[:count], parts)


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


def _step_experts(x: Tensor, w: QTensor, offs: Tensor | None, count: int) -> Tensor:
    """The same for a weight (E, N, K): x (E, M, K), or (M, K) with rows sorted by expert as `offs` says."""
    steps, parts = w.spec.input[:count], {n: getattr(w, n) for n in step_names(w.spec)}
    if offs is not None and w.shape[0]:
        rows = torch.arange(x.shape[0], device=x.device, dtype=offs.dtype)
        # rows behind those of the last expert are multiplied by nothing
        experts = torch.searchsorted(offs, rows, right=True).clamp(max=w.shape[0] - 1)
        parts = {n: part.squeeze(1).index_select(0, experts) for n, part in parts.items()}
    return stepped(x, steps, parts)


def _linear(
    fn: Callable[..., Tensor], count: int, x: Tensor, w: QTensor, bias: Tensor | None
) -> Tensor:
    return fn(step_rows(x, w, count), without_steps(w, count), bias)


def _grouped_linear(
    fn: Callable[..., Tensor], count: int, x: Tensor, w: QTensor, offs: Tensor | None
) -> Tensor:
    return fn(_step_experts(x, w, offs, count), without_steps(w, count), offs)


def linear_after_steps(fn: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """A kernel of the op "linear" with so many of the first input steps taken before it."""
    return partial(_linear, fn, count)


def grouped_linear_after_steps(fn: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """The same for a kernel of the op "grouped_linear"."""
    return partial(_grouped_linear, fn, count)
