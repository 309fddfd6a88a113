"""Activations that are quantized where they are computed, for the matmuls that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.errors import QuantizationError
from ao_core.records import Call
from ao_core.spec import Spec, matrix_block
from ao_core.tensor.qtensor import QTensor

__all__ = ["rms_norm_quantized", "silu_mul_quantized"]


def rms_norm_quantized(
    x: Tensor, weight: Tensor | None, spec: Spec, *, eps: float = 1e-6
) -> QTensor:
    """RMSNorm over the last dimension, x / sqrt(mean(x²) + eps) · weight, in codes.

    A linear layer that quantizes its activations as `spec` says takes the result as it is; so the normed
    activations are neither written nor kept for the backward pass in high precision. Computed in float32
    and rounded to the dtype of x before it is quantized. Gradients are those of RMSNorm, as if nothing
    were quantized.

    Args:
        x: (…, K).
        weight: (K,), or None for ones.
        spec: the `act` of the layer's spec, dynamic; where x has more than two dimensions, with blocks
            that are parts of rows.
        eps: added to the mean of squares.

    Raises:
        QuantizationError: `spec` is static, or its blocks are those of a matrix that x is not.
    """
    _check(x, spec)
    out: QTensor = _normed(x, weight, eps, spec)
    return out


def silu_mul_quantized(gate: Tensor, up: Tensor, spec: Spec) -> QTensor:
    """Silu(gate) · up in codes, as `rms_norm_quantized`; both are (…, K)."""
    _check(gate, spec)
    out: QTensor = _gated(gate, up, spec)
    return out


def _check(x: Tensor, spec: Spec) -> None:
    if spec.is_static:
        raise QuantizationError(
            f"{spec}: a static scale is known to the layer, not here; use a dynamic one"
        )
    if x.dim() > 2 and matrix_block(spec.block)[0] != 1:
        raise QuantizationError(
            f"{spec} on activations of shape {tuple(x.shape)}: its blocks hold several rows, of which tokens "
            "would be cut apart; pass them as a matrix"
        )


def _produce(op: str, spec: Spec, x: Tensor, *others: Any) -> QTensor:
    shape = tuple(x.shape)
    parts = run(Call(op, spec, shape, shape, x.dtype, x.device.type), x, *others)
    return QTensor(parts, spec, shape, x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, spec: Spec) -> QTensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _produce("rms_norm_quantize", spec, x, weight, eps, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, by = x.float(), grad.float()
        root = torch.rsqrt(rows.square().mean(-1, keepdim=True) + ctx.eps)
        normed = rows * root
        of_weight = None
        if weight is not None:
            of_weight = (by * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
            by = by * weight.float()
        of_x = root * (by - normed * (by * normed).mean(-1, keepdim=True))
        return of_x.to(x.dtype), of_weight, None, None


class _SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, spec: Spec) -> QTensor:
        ctx.save_for_backward(gate, up)
        return _produce("silu_mul_quantize", spec, gate, up, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        x, by = gate.float(), grad.float()
        share = torch.sigmoid(x)
        of_gate = by * up.float() * share * (1 + x * (1 - share))
        return of_gate.to(gate.dtype), (by * x * share).to(up.dtype), None


# these are run while tracing, not traced: they choose kernels
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _normed(x: Tensor, weight: Tensor | None, eps: float, spec: Spec) -> Any:
    return _RMSNorm.apply(x, weight, eps, spec)  # type: ignore[no-untyped-call]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _gated(gate: Tensor, up: Tensor, spec: Spec) -> Any:
    return _SiLUMul.apply(gate, up, spec)  # type: ignore[no-untyped-call]
