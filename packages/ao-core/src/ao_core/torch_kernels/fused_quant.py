"""The reference of the ops that compute activations and quantize them at once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ao_core.layouts import Parts
from ao_core.spec import Spec
from ao_core.tensor.encoding import encode_parts

__all__ = ["rms_norm_quantize", "silu_mul_quantize"]


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float, spec: Spec) -> Parts:
    """In float32, rounded to the dtype of x, and then quantized."""
    rows = x.float()
    rows = rows * (1 / (rows.square().mean(-1, keepdim=True) + eps).sqrt())
    if weight is not None:
        rows = rows * weight.float()
    return encode_parts(rows.to(x.dtype), spec)


def silu_mul_quantize(gate: Tensor, up: Tensor, spec: Spec) -> Parts:
    """In float32, rounded to the dtype of `gate`, and then quantized."""
    return encode_parts((F.silu(gate.float()) * up.float()).to(gate.dtype), spec)
