"""Convolutions whose activations are quantized: matmuls of what they unfold to, by kernels of "linear".

A row of the matmul is what one position of the output sees, of all channels. So a scale per token is one per
position, and a static one is for all of the input. Filters without quantized activations are dequantized, as
`matmul_values` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.dispatch import run
from ao_core.errors import UnsupportedOp
from ao_core.spec import ROW, TENSOR, WHOLE, Spec
from ao_core.tensor.matmuls import call_of, check_floating, matmul_values
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.rounded import rounded_activations
from ao_core.tensor.tables import rule

__all__ = [
    "FUNCTIONS",
    "as_matrix",
    "convolved",
    "convolved_by",
    "matrix_of",
    "matrix_spec_of",
    "unfolded",
]

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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


def matrix_spec_of(spec: Spec) -> Spec | None:
    """The format of filters as a matrix (out, in / groups * kernel); None where they are not seen as one."""
    lead, *rest = spec.block
    if len(rest) < 2 or set(rest) != {WHOLE} or spec.layout != "plain":
        return None
    return replace(spec, block=TENSOR if lead == WHOLE else ROW)


def matrix_of(
    spec: Spec, shape: tuple[int, ...], groups: int
) -> tuple[Spec, tuple[int, int]] | None:
    """Format and shape of the weight that kernels of "linear" see of filters; None where they see none."""
    found = matrix_spec_of(spec)
    if found is None or spec.act is None or groups != 1:
        return None
    return found, (shape[0], prod(shape[1:]))


def as_matrix(w: QTensor) -> QTensor:
    """Filters (out, in / groups, *kernel) as a matrix, a view of the same codes.

    Raises:
        UnsupportedOp: their format has blocks of less than a filter.
    """
    spec = matrix_spec_of(w.spec)
    if spec is None or w.is_permuted or w.flat_from is not None or w.spec.input:
        raise UnsupportedOp(
            f"a convolution with quantized activations needs filters with one scale each, or one for all, in "
            f"the layout 'plain'; found {w.spec}"
        )
    parts = {
        name: part.reshape(1 if part.shape[0] == 1 != w.shape[0] else w.shape[0], -1)
        if not name.startswith("act_")
        else part.reshape(1, 1)
        for name, part in w.parts.items()
    }
    return w.like(parts, (w.shape[0], prod(w.shape[1:])), spec=spec, order=(0, 1))


def convolved(
    x: Tensor,
    w: QTensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """A convolution whose activations are quantized as the spec of the filters says.

    One group of channels takes the kernels of "linear". Several are multiplied as rounded values in the dtype
    of x, since no kernel takes the groups of a matmul at once.

    Args:
        x: (batch, in, *sizes), or without the batch.
        w: filters (out, in / groups, *kernel), whose `spec.act` is set.
        bias: (out,) or None.
        stride: as of `unfolded`; so are the next three.
        padding: zeros on both sides.
        dilation: distance of neighbours in the kernel.
        groups: of channels.

    Returns:
        (batch, out, *positions), or without the batch, in the dtype of x.
    """
    check_floating("convolution", x)
    dims = w.dim() - 2
    if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != groups * w.shape[1]:
        raise UnsupportedOp(
            f"convolution: input of shape {tuple(x.shape)} does not fit filters of {tuple(w.shape)} in "
            f"{groups} groups"
        )
    batched = x if x.dim() == dims + 2 else x.unsqueeze(0)
    sizes = [
        (size + 2 * pad - step * (k - 1) - 1) // jump + 1
        for size, k, jump, pad, step in zip(
            batched.shape[2:], w.shape[2:], *_each(dims, stride, padding, dilation), strict=True
        )
    ]
    matrix = as_matrix(w)
    rows = unfolded(batched, tuple(w.shape), stride, padding, dilation, groups)
    if groups == 1:
        out = run(call_of("linear", rows[0], matrix), rows[0], matrix, bias)
    else:
        out = _grouped(torch.stack(rows), matrix)
        out = out if bias is None else out + bias
    out = out.reshape(batched.shape[0], *sizes, w.shape[0]).movedim(-1, 1).contiguous()
    return out if x.dim() == dims + 2 else out[0]  # type: ignore[no-any-return]


#: the functions of torch that take their arguments as `convolved_by` does
FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


def convolved_by(
    input: Tensor,
    weight: QTensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`convolved`, with the arguments of `torch.conv2d` and its like."""
    jump, steps = _numbers(stride), _numbers(dilation)
    if padding == "same":
        (wide,) = _each(weight.dim() - 2, steps)
        total = [step * (k - 1) for step, k in zip(wide, weight.shape[2:], strict=True)]
        sides = [side for each in reversed(total) for side in (each // 2, each - each // 2)]
        input, padding = F.pad(input, sides), 0
    around = (0,) if isinstance(padding, str) else _numbers(padding)
    return convolved(input, weight, bias, jump, around, steps, groups)


def _numbers(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _each(dims: int, *values: Sequence[int]) -> list[tuple[int, ...]]:
    """One number for each dimension, of one for each or one for all."""
    return [tuple(value) * (dims if len(value) == 1 else 1) for value in values]


def _grouped(rows: Tensor, w: QTensor) -> Tensor:
    """Products (positions, out) of rows (groups, positions, in / groups * kernel), each by its filters."""
    groups, positions, width = rows.shape
    dense = w.dequantize(rows.dtype).reshape(groups, -1, width)
    # one scale per position, shared by all groups of channels
    seen = rounded_activations(rows.transpose(0, 1).reshape(positions, groups * width), w)
    out = torch.bmm(seen.reshape(positions, groups, width).transpose(0, 1), dense.transpose(1, 2))
    return out.transpose(0, 1).reshape(positions, -1)


def _takes(x: Any, w: Any, transposed: bool) -> bool:
    """Whether a convolution is of activations that its filters want quantized."""
    return (
        isinstance(w, QTensor)
        and w.spec.act is not None
        and not isinstance(x, QTensor)
        and not transposed
    )


@rule(aten.convolution.default)
def _convolution(func: Any, args: Args, kwargs: Kwargs) -> Any:
    names = (
        "input",
        "weight",
        "bias",
        "stride",
        "padding",
        "dilation",
        "transposed",
        "_",
        "groups",
    )
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    x, w = named["input"], named["weight"]
    if not _takes(x, w, named["transposed"]):
        return matmul_values(func, args, kwargs)
    rest = (named[name] for name in ("stride", "padding", "dilation", "groups"))
    return convolved(x, w, named["bias"], *rest)
