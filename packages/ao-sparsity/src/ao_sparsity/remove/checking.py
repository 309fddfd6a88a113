"""Whether a smaller model computes what the dense one does when nothing reads what was removed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ao_core.ext.graph import Axis, Inputs, outputs, relative_difference, tensors_of
from ao_sparsity.remove.errors import RemovalError
from ao_sparsity.remove.groups import ChannelGroup

__all__ = ["TOLERANCES", "difference", "unread"]

#: dtype -> norm of the difference over norm of the output up to which rounding explains it
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


def unread(
    model: nn.Module, groups: Mapping[Axis, ChannelGroup], gone: Mapping[Axis, Tensor]
) -> dict[str, Tensor]:
    """The weights of which matmuls read nothing of these channels: their columns are zero."""
    tensors = tensors_of(model)
    found: dict[str, Tensor] = {}
    for atom, away in gone.items():
        group = groups[atom]
        for name, dim in group.readers:
            columns = group.indices((name, dim), away).nonzero().flatten()
            old = tensors[name].detach()
            changed = found.setdefault(name, old.clone())
            changed.index_fill_(dim, columns.to(old.device), 0)
    return {
        name: nn.Parameter(value, requires_grad=False)
        if isinstance(tensors[name], nn.Parameter)
        else value
        for name, value in found.items()
    }


def difference(dense: nn.Module, smaller: nn.Module, inputs: Inputs) -> tuple[float, float]:
    """The norm of the difference of all outputs over that of the dense ones, and what rounding explains.

    Raises:
        RemovalError: the outputs have no numbers to compare, have NaN, or are of other shapes.
    """
    expected, found = outputs(dense, inputs), outputs(smaller, inputs)
    if not expected or [t.shape for t in expected] != [t.shape for t in found]:
        raise RemovalError("the outputs of the smaller model are not those of the dense one")
    if any(t.isnan().any() for t in expected):
        raise RemovalError(
            "the outputs of the dense model have NaN (in its weights or the example inputs?), "
            "so it cannot be checked that the smaller one is equal"
        )
    dtypes = {t.dtype for t in (*expected, *dense.parameters())}
    bound = max((TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES), default=0.0)
    return relative_difference(expected, found), bound
