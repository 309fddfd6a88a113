"""Whether a changed model computes what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ao_core.errors import GraphError
from ao_core.graph.copies import copied, selecting, sharing, tensors_of
from ao_core.graph.export import Inputs, arguments
from ao_core.mapped import spilled

__all__ = ["Transform", "outputs", "prove", "proven", "relative_difference"]

#: elements that are compared at a time
_PART = 1 << 20

#: new values of some tensors of a model, from all of them by name; a pure function
Transform: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def outputs(
    model: nn.Module, inputs: Inputs, select: Callable[[Any], Any] | None = None
) -> list[Tensor]:
    """The floating-point outputs of a model in evaluation mode."""
    args, kwargs = arguments(inputs)
    with torch.no_grad():
        found: Any = selecting(sharing(model), select)(*args, **kwargs)
    leaves = pytree.tree_leaves(found)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def relative_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The norm of the difference of tensors of equal shapes over the norm of the expected ones.

    Elements that are the same infinity differ by nothing.
    """
    wrong = total = 0.0
    for one, other in zip(expected, found, strict=True):
        # in float64 some elements at a time: logits of many tokens are large
        pairs = zip(_parts(one), _parts(other), strict=True)
        for a, b in ((a.double(), b.double()) for a, b in pairs):
            same = a == b
            wrong += float((a - b).masked_fill(same, 0).square().sum())
            total += float(a.masked_fill(a.isinf(), 0).square().sum())
    return math.sqrt(wrong / max(total, torch.finfo(torch.float64).tiny))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = tensor.detach().reshape(-1).split(_PART)
    return parts


def prove(
    model: nn.Module,
    example_inputs: Inputs,
    transform: Transform,
    *,
    what: str,
    select: Callable[[Any], Any] | None = None,
    online: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
) -> float:
    """Change tensors of a model if its outputs for example inputs stay the same.

    The outputs are compared in float32 (float64 where the model is in float64) on a copy that shares
    everything else, before anything is written: a model in bfloat16 is compared as its float32 copy.

    Args:
        model: any module; it is run in evaluation mode.
        example_inputs: a tuple of positional arguments, a mapping of named ones, or one tensor.
        transform: new values of some tensors, from the tensors of the model by name, as
            `lambda tensors: scaled(tensors, group, scales)`.
        what: what is changed, for the error.
        select: what of the model's outputs has to stay, as `lambda output: output.logits`; all by default.
        online: module -> matrix R; while the outputs are compared, the module's input x is x·R. Whoever
            changes the model brings a step that computes it from then on.
        tolerance: norm of the difference over the norm of the outputs.

    Returns:
        The relative difference that was found.

    Raises:
        GraphError: the outputs differ by more, or cannot be compared. The model is as it was.
    """
    error, values = _checked(model, example_inputs, transform, what, select, online, tolerance)
    tensors = tensors_of(model)
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)
    return error


def proven(
    model: nn.Module,
    example_inputs: Inputs,
    transform: Transform,
    *,
    what: str,
    select: Callable[[Any], Any] | None = None,
    tolerance: float = 1e-5,
) -> nn.Module:
    """`prove` for a copy: the model with changed tensors, which shares all others; the model stays as it was.

    Raises:
        GraphError: the outputs differ by more, or cannot be compared.
    """
    _, values = _checked(model, example_inputs, transform, what, select, None, tolerance)
    return sharing(model, values)


def _checked(
    model: nn.Module,
    example_inputs: Inputs,
    transform: Transform,
    what: str,
    select: Callable[[Any], Any] | None,
    online: Mapping[str, Tensor] | None,
    tolerance: float,
) -> tuple[float, dict[str, Tensor]]:
    """The difference of outputs, which is allowed, and the values that make it."""
    exact = _in_float32(model)
    if exact is not model:
        example_inputs = pytree.tree_map(_float32, example_inputs)
    changed = _parameters(exact, transform, what)
    candidate = sharing(exact, changed)
    handles = [
        candidate.get_submodule(name).register_forward_pre_hook(_times(matrix))
        for name, matrix in (online or {}).items()
    ]
    expected = outputs(exact, example_inputs, select)
    found = outputs(candidate, example_inputs, select)
    for handle in handles:
        handle.remove()
    if not expected or [t.shape for t in expected] != [t.shape for t in found]:
        raise GraphError(f"{what}: the model has no outputs that could be compared")
    error = relative_difference(expected, found)
    if not error <= tolerance:
        raise GraphError(
            f"{what}: the outputs for the example inputs would differ by {error:.2g} of their norm, where "
            f"{tolerance:.2g} is allowed; the model is as it was"
        )
    return error, changed if exact is model else _parameters(model, transform, what)


def _float32(value: Any) -> Any:
    small = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() < 4
    return value.float() if small else value


def _in_float32(model: nn.Module) -> nn.Module:
    """The model, or a copy in float32 if a tensor of it has fewer bits."""
    small = {
        name: tensor for name, tensor in tensors_of(model).items() if _float32(tensor) is not tensor
    }
    if not small:
        return model
    return copied(model, {n: _like(t, spilled(_float32(t.detach()))) for n, t in small.items()})


def _parameters(model: nn.Module, transform: Transform, what: str) -> dict[str, Tensor]:
    tensors = tensors_of(model)
    found = {}
    for name, value in transform(tensors).items():
        if name not in tensors or tensors[name].shape != value.shape:
            raise GraphError(
                f"{what}: the model has no tensor {name} of shape {tuple(value.shape)}"
            )
        found[name] = _like(tensors[name], value.to(tensors[name].dtype))
    return found


def _like(old: Tensor, value: Tensor) -> Tensor:
    """A parameter where the old tensor is one."""
    return nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value


def _times(matrix: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return ((args[0].double() @ matrix.double()).to(args[0].dtype), *args[1:])

    return hook
