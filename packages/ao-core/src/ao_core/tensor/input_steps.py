"""Input steps of a `QTensor`: their parts, and the values of a stepped weight.

See `ao_core.steps` for what a step does. The parts `in_perm` (int32) and `in_scale` (float32) have one entry
for each element of a row of activations, in as many dimensions as the weight: (1, K), or (E, 1, K) where each
expert has its own. `low_rank_b` (N, r) and `low_rank_a` (r, K) are in bfloat16, those of experts with a
dimension more. Codes and scales know nothing of them, and so no layout does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ao_core.arguments import shown
from ao_core.errors import ConfigError, QuantizationError, UnsupportedOp
from ao_core.layouts import SHARED, Form, Geometry, PartAxis, Parts
from ao_core.numerics import has_hadamard, largest_block
from ao_core.spec import Spec
from ao_core.steps import LOW_RANK, ROW_STEPS, Step
from ao_core.tensor.checks import check_given

__all__ = [
    "added_of",
    "cannot_cut",
    "cannot_join",
    "identity_steps",
    "make_step_parts",
    "misfit",
    "step_axes",
    "step_forms",
    "step_names",
    "step_weight",
    "stepped",
    "stored_spec",
    "unstep_weight",
    "wrong_steps",
]

#: kind of step -> its parts
_PARTS = {
    "permute": ("in_perm",),
    "scale": ("in_scale",),
    LOW_RANK: ("low_rank_b", "low_rank_a"),
}
_DTYPES = {
    "in_perm": torch.int32,
    "in_scale": torch.float32,
    "low_rank_b": torch.bfloat16,
    "low_rank_a": torch.bfloat16,
}


def step_names(spec: Spec) -> tuple[str, ...]:
    """The parts that a tensor of this format has for its input steps, in their order."""
    return tuple(name for step in spec.input for name in _PARTS.get(step.kind, ()))


def stored_spec(spec: Spec) -> Spec:
    """The format of the stored values, those of the stepped weight: the same without input steps."""
    return replace(spec, input=()) if spec.input else spec


def _rank(spec: Spec) -> int:
    return next((step.block for step in spec.input if step.kind == LOW_RANK), 0)


def _shape(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if name == "low_rank_b":
        return (*shape[:-1], rank)
    rows = rank if name == "low_rank_a" else 1
    return (*shape[:-2], *(rows,) * (len(shape) > 1), shape[-1])


def step_axes(spec: Spec, shape: tuple[int, ...]) -> dict[str, Geometry]:
    """The geometry of these parts: an entry for each column, which all rows share; `low_rank_b` has rows."""
    single = PartAxis(1, 1)
    lead, shared = (single,) * (len(shape) - 2), (SHARED,) * (len(shape) > 1)
    return {
        name: (*lead, single, *shared) if name == "low_rank_b" else (*lead, *shared, single)
        for name in step_names(spec)
    }


def step_forms(spec: Spec, shape: tuple[int, ...]) -> dict[str, Form]:
    """What these parts must be, of a tensor of stored `shape`."""
    rank = _rank(spec)
    return {name: Form(_shape(name, shape, rank), _DTYPES[name]) for name in step_names(spec)}


def misfit(spec: Spec, shape: tuple[int, ...]) -> str | None:
    """Why the rows of a tensor of this shape cannot go through the steps, if so."""
    k = shape[-1]
    if _rank(spec) and len(shape) < 2:
        return "a row by itself has no part of low rank"
    for step in spec.input:
        if step.kind != "hadamard":
            continue
        if k % step.block:
            return (
                f"the input step {str(step)!r} needs rows in whole blocks, and they have {k} elements; the "
                f"largest block of {k} that has a Hadamard matrix is {largest_block(max(k, 1))}"
            )
        if not has_hadamard(step.block):
            return (
                f"the input step {str(step)!r}: no construction of a Hadamard matrix of {step.block} is "
                f"known to ao; the largest block of {k} that has one is {largest_block(max(k, 1))}"
            )
    return None


def wrong_steps(parts: Parts) -> str | None:
    """Why parts, of the right forms, are no permutation or hold values that cannot be undone, if so."""
    perm, scale = parts.get("in_perm"), parts.get("in_scale")
    if perm is not None and _has_values(perm):
        places = torch.arange(perm.shape[-1], device=perm.device, dtype=perm.dtype)
        if not torch.equal(perm.sort(-1).values, places.expand(perm.shape)):
            return f"in_perm must hold each index from 0 to {perm.shape[-1] - 1} once in each row"
    for name in _PARTS[LOW_RANK]:
        part = parts.get(name)
        if part is not None and _has_values(part) and not bool(part.isfinite().all()):
            return f"{name} must be finite in bfloat16"
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
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Parts:
    """The parts from what `quantize_tensor` is given: (K,) for all matrices, or (..., K) for each.

    `low_rank` has B and A.

    Raises:
        ConfigError: of another shape or dtype, or no permutation, or a scale that is 0 or not finite.
        QuantizationError: values are missing or superfluous, or the rows do not fit the steps.
    """
    b, a = low_rank or (None, None)
    given = {"in_perm": in_perm, "in_scale": in_scale, "low_rank_b": b, "low_rank_a": a}
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
    if name in _PARTS[LOW_RANK] and tuple(value.shape) != shape:
        raise ConfigError(f"{name}={shown(value)} has the shape {tuple(value.shape)}; use {shape}")
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
    make = torch.ones if name == "in_scale" else torch.zeros
    return make(shape, dtype=_DTYPES[name], device=device)


def cannot_cut(spec: Spec, start: int, length: int) -> str | None:
    """Why columns from `start` do not go through the steps by themselves, if so; not asked of all columns."""
    for step in spec.input:
        if step.kind == "permute":
            return "the input step 'permute' takes columns to any place"
        if step.kind == "hadamard" and (start % step.block or length % step.block):
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


def added_of(parts: Parts, dtype: torch.dtype) -> Tensor:
    """B A, what the step "low_rank" takes out of a weight."""
    return parts["low_rank_b"].to(dtype) @ parts["low_rank_a"].to(dtype)


def stepped(x: Tensor, steps: tuple[Step, ...], parts: Parts) -> Tensor:
    """S x of activations, in the dtype of x; the parts broadcast over its rows."""
    steps = tuple(step for step in steps if step.kind in ROW_STEPS)
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
        elif step.kind == LOW_RANK:
            wide = wide - added_of(parts, wide.dtype)
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
        elif step.kind == LOW_RANK:
            wide = wide + added_of(parts, wide.dtype)
        else:
            wide = _rotated(wide, step.block, inverse=True)
    return wide.to(dtype)
