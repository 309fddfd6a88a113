"""Quantized weights as adapters need them: multiplied exactly, quantized again, shifted by groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ao_core import WHOLE, QTensor
from ao_core.ext import NO_SCALE, QuantizationError, repack
from ao_core.ext.kernels import unpack_parts
from ao_core.ext.numerics import zero_to_float

__all__ = ["dense", "requantized", "row_squares", "shifted", "without_activations"]

#: parts that belong to the quantization of activations
_OF_ACTIVATIONS = ("act_scale", "act_zero_point")


def dense(weight: Tensor) -> Tensor:
    """The values of a weight, quantized or not, in float32."""
    values = weight.detach()
    return values.dequantize(torch.float32) if isinstance(values, QTensor) else values.float()


def row_squares(weight: Tensor) -> Tensor:
    """‖w‖² of each row of a matrix (N, K): (N,), summed in float64 and rounded to float32."""
    return dense(weight).double().square().sum(1).float()


def without_activations(weight: Tensor) -> Tensor:
    """The same memory as a weight whose matmuls leave activations alone; itself where they do."""
    if not isinstance(weight, QTensor) or weight.spec.act is None:
        return weight
    parts = {n: p for n, p in weight.parts.items() if n not in _OF_ACTIVATIONS}
    return weight.like(parts, spec=replace(weight.spec, act=None))


@torch.no_grad()
def requantized(weight: Tensor, values: Tensor) -> Tensor:
    """`values` (float32, the shape of `weight`) in the format and layout of `weight`, which keeps its own.

    Values that `weight` has already get its very codes; others get scales by the largest magnitude.
    """
    new = weight.detach().to(torch.float32).clone()
    new.copy_(values)
    return new.to(weight.dtype)


@torch.no_grad()
def shifted(weight: Tensor, shift: Tensor, group: int) -> Tensor:
    """The weight with `shift[n, k // group]` added to element (n, k), with the same codes and scales.

    The shift goes into the zero points, which become float32 offsets; the scales become float32 too, with
    the values they have.

    Args:
        weight: a matrix (N, K) with blocks of (1, g) elements, where g divides `group`.
        shift: (N, K / group), float32.
        group: columns that share one shift.

    Raises:
        QuantizationError: a group of the adapter spans a part of a block, or the format has no scales.
    """
    assert isinstance(weight, QTensor)
    base = weight.canonical()
    spec, shape, layout = base.spec, base.stored_shape, base.layout_record
    width = shape[-1] if spec.block[-1] == WHOLE else spec.block[-1]
    if len(spec.block) != 2 or spec.block[0] != 1 or group % width:
        raise QuantizationError(
            f"groups of {group} columns do not consist of whole blocks of {spec}; use a qalora_group_size "
            f"that is a multiple of {width}, in a format whose blocks are parts of one row"
        )
    if spec.scale_dtype == NO_SCALE or base.format.kind == "codebook" or not layout.affine:
        raise QuantizationError(f"{spec} has no zero points that could take a shift")
    if spec.input or base.is_permuted:
        raise QuantizationError(
            f"{spec} has input steps, or is transposed; zero points cannot shift it"
        )
    codes, scale, zero = unpack_parts(base.parts, spec, shape)
    assert scale is not None  # there is one: see above
    offset = torch.zeros_like(scale) if zero is None else zero_to_float(zero, base.format)
    if spec.zero_point != "offset":
        offset = offset * scale
    starts = torch.arange(scale.shape[1], device=scale.device) * width
    offset = offset - shift.to(scale.dtype)[:, starts // group]
    new = replace(spec, scale_dtype="float32", zero_point="offset")
    packed = layout.pack(codes, scale, offset, new, base.format)
    others = {n: part for n, part in base.parts.items() if n not in packed}
    return repack(base.like(packed | others, spec=new))
