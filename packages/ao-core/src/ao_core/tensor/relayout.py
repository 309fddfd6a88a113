"""Changing the layout of a `QTensor` without changing a bit of its codes and scales."""

from __future__ import annotations

from dataclasses import replace

import torch

from ao_core.dispatch import product_op, select
from ao_core.errors import UnsupportedOp
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.tensor.activations import act_names
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.updates import STOCHASTIC

__all__ = ["native", "to_canonical", "to_layout"]


def to_canonical(tensor: QTensor) -> QTensor:
    """The tensor in the canonical layout of its own; itself where it is canonical already."""
    layout = tensor.layout_record
    return tensor if layout.canonical else to_layout(tensor, layout.canonical_name)


def to_layout(tensor: QTensor, name: str) -> QTensor:
    """The tensor in the layout `name`, which must be its canonical one or convert to and from it."""
    if tensor.spec.layout == name:
        return tensor
    source, target = tensor.layout_record, registry.layouts.get(name)
    shape, dtype = tensor.stored_shape, tensor.format
    canonical = source.canonical_name or source.name
    if canonical != (target.canonical_name or target.name):
        raise UnsupportedOp(
            f"layout {source.name!r} (canonical {canonical!r}) does not convert to {name!r}; "
            "dequantize and quantize again"
        )
    spec = replace(tensor.spec, layout=canonical)
    parts = source.to_canonical(tensor.parts, tensor.spec, shape, dtype)
    if not target.canonical:
        spec = replace(spec, layout=name)
        if reason := target.fits(spec, shape, dtype):
            raise UnsupportedOp(f"layout {name!r} cannot hold a tensor of {shape}: {reason}")
        parts = target.from_canonical(parts, spec, shape, dtype)
    kept = {part: getattr(tensor, part) for part in act_names(spec)}
    return tensor.like(parts | kept, spec=spec)


def native(tensor: QTensor, dtype: torch.dtype | None = None) -> QTensor:
    """The tensor in the layout of the best kernel for its device and the activations' dtype.

    A layout is a candidate when it names the device in `native_devices`, holds the tensor, and its
    best kernel for products with such a weight outranks what serves the canonical layout. A weight that
    is trained stays in that: every step writes it.
    """
    base = to_canonical(tensor)
    shape, device = base.stored_shape, base.device.type
    names = [
        layout.name
        for layout in registry.layouts.values()
        if layout.canonical_name == base.spec.layout
        and device in layout.native_devices
        and layout.fits(replace(base.spec, layout=layout.name), shape, base.format) is None
    ]
    op = product_op(shape)
    if op is None or not names or STOCHASTIC in base.spec.options:
        return base

    def priority(name: str) -> int:
        spec = replace(base.spec, layout=name)
        return select(Call(op, spec, shape, (1, shape[-1]), dtype or base.dtype, device)).priority

    # the canonical layout is first, so that others must be better than it
    return to_layout(base, max([base.spec.layout, *names], key=priority))
