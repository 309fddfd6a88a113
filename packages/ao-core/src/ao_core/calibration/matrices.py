"""Weights as the matrices that rows of activations are multiplied with: experts, filters of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from ao_core.records import Target
from ao_core.weights import is_transposed

__all__ = ["matrices", "matrix_shape", "operand", "unmatrices"]


def matrix_shape(shape: tuple[int, ...], target: Target) -> tuple[int, int, int]:
    """The number of matrices in a weight, and their rows and columns: (E, out, in).

    A weight (out, in) is one, also where its module stores it as (in, out); one of experts (E, out, in)
    is E. Filters (out, in / groups, *kernel) are one for each group of channels:
    (groups, out / groups, in / groups * kernel).
    """
    if is_transposed(target):
        return 1, shape[1], shape[0]
    if isinstance(target.module, _ConvNd):
        groups = int(target.module.groups)
        return groups, shape[0] // groups, prod(shape[1:])
    count, rows, columns = (1, *shape)[-3:]
    return (count, rows, columns) if len(shape) == 3 else (1, rows, columns)


def matrices(weight: Tensor, target: Target) -> Tensor:
    """A weight, or values of its shape, as (E, out, in); see `matrix_shape`."""
    if is_transposed(target):
        return weight.t().unsqueeze(0)
    return weight.reshape(matrix_shape(tuple(weight.shape), target))


def unmatrices(values: Tensor, shape: Sequence[int], target: Target) -> Tensor:
    """Inverse of `matrices`, for a weight of `shape`."""
    return values[0].t().contiguous() if is_transposed(target) else values.reshape(tuple(shape))


def operand(weight: Tensor, target: Target) -> Tensor:
    """The weight as `observing` takes it: a view (out, in) of one that is stored as (in, out)."""
    return weight.t() if is_transposed(target) else weight
