"""A linear layer of an engine with a quantized weight, whatever the engine is.

Engines allocate parameters, copy slices of the files into them, and then ask for the product. Parameters are
the parts of ao's format; the weight is put together when all are loaded, in the layout of the best kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import QTensor, Spec
from ao_core.ext import SHARED, CheckpointError, UnsupportedOp, forms_of, registry, repack
from ao_core.ext.saving import rebuild, record_of

__all__ = ["add_parameters", "multiply", "put_together"]

#: of the tensor without elements that files have under the name of a quantized weight
_PLACEHOLDER = (torch.uint8, (0,))


def add_parameters(
    layer: Any,
    spec: Spec,
    columns: tuple[int, int],
    rows: list[int],
    dtype: torch.dtype,
    weight_loader: Callable[..., Any],
) -> None:
    """Give an engine's layer a parameter for each part of a weight, and the placeholder.

    The attributes `output_dim` and `input_dim` say which dimensions of a part follow rows and columns;
    the loaders of the engines cut along them.

    Args:
        layer: gets `weight` and `weight_PART`.
        spec: the format, in a canonical layout.
        columns: of this rank, and of all.
        rows: of this rank, for each layer that the engine joins.
        dtype: of the logical weight.
        weight_loader: copies a tensor of a file into a parameter.

    Raises:
        UnsupportedOp: the columns of a rank end inside a group.
    """
    own, whole = columns
    shape = (sum(rows), own)
    layout, number = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    geometry = layout.geometry(spec, (sum(rows), whole), number)
    for _, axis in geometry.values():
        if axis is not SHARED and own != whole and own % axis.values:
            raise UnsupportedOp(
                f"a rank gets {own} columns of a weight of {spec}, which end inside a group of "
                f"{axis.values}; use fewer ranks"
            )
    layer.register_parameter("weight", _parameter(torch.empty(0, dtype=torch.uint8)))
    layer.weight.weight_loader = _check_placeholder
    forms = forms_of(layout, spec, shape, number)
    for name, form in forms.items():
        part = _parameter(torch.empty(form.shape, dtype=form.dtype))
        part.output_dim = 0
        if geometry[name][1] is not SHARED:
            part.input_dim = 1
        part.weight_loader = weight_loader
        layer.register_parameter(f"weight_{name}", part)
    layer.ao_weight = (spec, shape, dtype, tuple(forms))


def put_together(layer: Any) -> None:
    """Make the loaded parameters one quantized weight, in the layout of the best kernel for its device.

    Raises:
        CheckpointError: the parts do not fit together.
    """
    spec, shape, dtype, names = layer.ao_weight
    parts = {name: getattr(layer, f"weight_{name}").detach() for name in names}
    made = QTensor(parts, spec, shape, dtype)
    weight = rebuild("weight", record_of(made), lambda leaf: parts[leaf.removeprefix("weight.")])
    for name in names:
        delattr(layer, f"weight_{name}")
    layer.weight = nn.Parameter(repack(weight, dtype), requires_grad=False)


def multiply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product, by the best kernel of ao for this shape and dtype."""
    return F.linear(x, layer.weight, bias)


def _parameter(data: Tensor) -> Any:
    return nn.Parameter(data, requires_grad=False)


def _check_placeholder(param: Tensor, loaded: Tensor, *shard: Any) -> None:
    """The loader of the tensor that stands under the name of the weight: it has nothing to load."""
    if (loaded.dtype, tuple(loaded.shape)) != _PLACEHOLDER:
        raise CheckpointError(
            f"a weight that is quantized in one file is {loaded.dtype} {tuple(loaded.shape)} in another"
        )
