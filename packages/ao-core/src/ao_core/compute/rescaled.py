"""Quantized weights whose scales are trained while their codes stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core.compute.learned import off_zero
from ao_core.numerics import block_sum, expand, scale_to_float, store_qparams
from ao_core.registry import registry
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import repack

__all__ = ["rescaled", "rescaled_with_gradient", "trainable_scale"]


def trainable_scale(q: QTensor) -> Tensor | str:
    """The scales of a weight (N, K) as float32, one per block, or why they cannot be trained."""
    spec = q.spec
    kind = registry.dtypes.get(spec.dtype).kind
    if not isinstance(spec.scale_dtype, str) or kind == "codebook" or spec.input:
        return (
            f"{spec}: only one plain scale per block, of a format without input steps, is trained"
        )
    if spec.zero_point == "offset" or spec.scale_dtype in ("none", "e8m0"):
        return f"{spec}: its scales are no free factors of the values"
    if q.dim() != 2 or q.is_permuted:
        return "it is not the matrix of a linear layer"
    return scale_to_float(q.canonical().parts["scale"])


def rescaled(q: QTensor, scale: Tensor) -> QTensor:
    """The same codes with other scales, in the layout of the best kernel; without a gradient."""
    base = q.canonical()
    spec = base.spec
    numbers = registry.dtypes.get(spec.dtype)
    by, kind = off_zero(scale.detach(), spec), spec.chosen_scale_dtype
    stored, _ = store_qparams(by, None, numbers, "none", kind)
    return repack(base.like({**base.parts, "scale": stored}))


def rescaled_with_gradient(q: QTensor, scale: Tensor) -> Tensor:
    """`rescaled`: the derivative by a scale is the sum over its block of codes less zero points."""
    out: Tensor = _Rescaled.apply(scale, q)  # type: ignore[no-untyped-call]
    return out


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Tensor, q: QTensor) -> QTensor:
        out = rescaled(q, scale)
        ctx.save_for_backward(scale, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scale, q = ctx.saved_tensors
        block = q.spec.block
        stored = scale_to_float(q.canonical().parts["scale"])
        codes = q.dequantize().float() / expand(stored, q.shape, block)
        return block_sum(grad.float() * codes, block).to(scale.dtype), None
