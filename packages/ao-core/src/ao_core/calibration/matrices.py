"""Weights as the matrices that rows of activations are multiplied with: experts, filters of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from ao_core.records import Target
from ao_core.weights import is_transposed

__all__ = ["matrices", "matrix_shape", "operand", "unfolded", "unmatrices"]


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


def unfolded(
    x: Tensor,
    shape: tuple[int, ...],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> list[Tensor]:
    """What a convolution multiplies the filters of each group with: (positions, in / groups * kernel).

    Args:
        x: (batch, in, *sizes), or without the batch.
        shape: of the filters, (out, in / groups, *kernel).
        stride: as of the convolution, for each dimension or one for all; so are the next two.
        padding: zeros on both sides.
        dilation: distance of neighbours in the kernel.
        groups: of channels.
    """
    kernel = shape[2:]
    dims = len(kernel)
    stride, padding, dilation = (
        tuple(each) * (dims if len(each) == 1 else 1) for each in (stride, padding, dilation)
    )
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    x = F.pad(x, [side for pad in reversed(padding) for side in (pad, pad)])
    for dim in range(dims):
        # every window as a last dimension, of which dilation takes each so-manieth
        size = (kernel[dim] - 1) * dilation[dim] + 1
        x = x.unfold(2 + dim, size, stride[dim])[..., :: dilation[dim]]
    channels = x.unflatten(1, (groups, x.shape[1] // groups))
    # (batch, groups, in / groups, *positions, *kernel) -> groups of (batch, *positions, in / groups, *kernel)
    order = (1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    rows = channels.permute(order)
    return list(rows.reshape(groups, -1, prod(shape[1:])))
