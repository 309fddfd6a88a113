"""Changing the layout of a `QTensor` without changing a bit of its codes and scales."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ao_core.dispatch import matmul_op, once_per_call, select
from ao_core.errors import UnsupportedOp
from ao_core.guarded import ask, attempt
from ao_core.layouts import Parts, has_foreign_zeros
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.beside import beside_names
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.updates import STOCHASTIC

__all__ = ["best_spec", "repack", "to_canonical", "to_layout"]


def to_canonical(tensor: QTensor) -> QTensor:
    """The tensor in the canonical layout of its own; itself where it is canonical already."""
    layout = tensor.layout_record
    return (
        tensor
        if layout.canonical
        else to_layout(tensor, layout.canonical_of(tensor.spec, tensor.format))
    )


def to_layout(tensor: QTensor, name: str) -> QTensor:
    """The tensor in the layout `name`: the same values, scales and codes, bit for bit.

    Raises:
        UnsupportedOp: `name` has another canonical layout, or cannot hold a tensor of this format and shape.
        UnknownNameError: nobody registered a layout `name`.
    """
    if tensor.spec.layout == name:
        return tensor
    source, target = tensor.layout_record, registry.layouts.get(name)
    shape, dtype = tensor.stored_shape, tensor.format
    canonical = source.canonical_of(tensor.spec, dtype)
    if canonical != target.canonical_of(tensor.spec.in_layout(name), dtype):
        raise UnsupportedOp(
            f"layout {source.name!r} (canonical {canonical!r}) does not convert to {name!r}; "
            "dequantize and quantize again"
        )
    spec = tensor.spec.in_layout(canonical)
    parts = source.to_canonical(tensor.parts, tensor.spec, shape, dtype)
    if not target.canonical:
        spec = spec.in_layout(name)
        if reason := ask(registry.layouts, name, "refuses", spec, shape, dtype):
            raise UnsupportedOp(f"layout {name!r} cannot hold a tensor of {shape}: {reason}")
        if has_foreign_zeros(parts, spec, dtype):
            raise UnsupportedOp(
                f"layout {name!r} holds zero points from 0 to {(1 << dtype.bits) - 1}, the codes of "
                f"{dtype.name}, and found {int(parts['zero_point'].max())}; quantize with more bits, or keep "
                f"layout {canonical!r}, which computes with it"
            )
        parts = target.from_canonical(parts, spec, shape, dtype)
    return tensor.like(parts | _beside(tensor), spec=spec)


def repack(tensor: QTensor, dtype: torch.dtype | None = None) -> QTensor:
    """The tensor in the layout of the best kernel for its device and the activations' dtype.

    A layout is a candidate when it names the device in `auto_devices`, holds the tensor, and its
    best kernel for matmuls with such a weight outranks what serves the canonical layout. A weight that
    is trained stays in that: every step writes it.
    """
    base = to_canonical(tensor)
    shape, device = base.stored_shape, base.device.type
    op = matmul_op(shape)
    if op is None or STOCHASTIC in base.spec.options:
        return base
    call = Call(op, base.spec, shape, (1, shape[-1]), dtype or base.dtype, device)
    for spec in _ranked(call):
        found = _converted(base, spec)
        if found is not None:
            return found
    return base


def best_spec(call: Call) -> Spec:
    """The format of a call with the layout that `repack` tries first.

    Raises:
        UnsupportedOp: nothing computes with it.
    """
    return _ranked(call)[0]


@once_per_call
def _ranked(call: Call) -> tuple[Spec, ...]:
    """The call's format, in each layout that can hold the weight, by the kernel it would have then."""
    specs = [
        call.spec.in_layout(name)
        for name, layout in registry.layouts.items()
        if not layout.canonical and call.device in layout.auto_devices
    ]

    def priority(spec: Spec) -> float:
        try:
            return select(replace(call, spec=spec)).priority
        except UnsupportedOp:
            if spec == call.spec:
                raise  # nothing computes with this format: better said now than by the first matmul
            return -math.inf

    # the canonical layout is first, so that others must be better than it
    held = [call.spec, *(spec for spec in specs if _holds(spec, call))]
    return tuple(sorted(held, key=priority, reverse=True))


def _holds(spec: Spec, call: Call) -> bool:
    """Whether a layout holds such a weight, and its canonical one is the weight's."""
    name, dtype = spec.layout, registry.dtypes.get(spec.dtype)
    canonical, refusal = attempt(registry.layouts, name, "canonical_of", spec, dtype)
    if refusal is not None or canonical != call.spec.layout:
        return False
    return ask(registry.layouts, name, "refuses", spec, call.weight_shape, dtype) is None


def _converted(base: QTensor, spec: Spec) -> QTensor | None:
    """The tensor in a layout that was not asked for by name; None where its conversion fails."""
    if spec == base.spec:
        return base
    if has_foreign_zeros(base.parts, base.spec, base.format):
        return None
    arguments = (base.parts, spec, base.stored_shape, base.format)
    parts, refusal = attempt(
        registry.layouts, spec.layout, "from_canonical", *arguments, timed=False
    )
    return None if refusal is not None else base.like(parts | _beside(base), spec=spec)


def _beside(tensor: QTensor) -> Parts:
    """The parts that layouts know nothing of."""
    return {name: getattr(tensor, name) for name in beside_names(tensor.spec)}
