"""Kernels of the reference band: plain torch, any layout, any device, any shape, always right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.records import Kernel
from ao_core.spec import Spec
from ao_core.tensor import cut
from ao_core.tensor.create import fake_quantize
from ao_core.tensor.qtensor import QTensor

__all__ = ["REFERENCE_KERNELS"]


def linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Quantize the activations as the spec says, dequantize the weight, multiply in x's dtype."""
    if w.spec.act is not None:
        # blocks of activations are those of the matrix (tokens, K), whatever the rank of x
        x = fake_quantize(x.reshape(-1, x.shape[-1]), w.spec.act).reshape(x.shape)
    return F.linear(x, w.dequantize(x.dtype), bias)


def embedding(ids: Tensor, w: QTensor) -> Tensor:
    """Dequantize only the rows that are looked up, where the layout can gather rows."""
    try:
        rows = cut.gather_rows(w, ids.reshape(-1)).dequantize()
    except UnsupportedOp:
        rows = w.dequantize().index_select(0, ids.reshape(-1))
    return rows.reshape(*ids.shape, w.shape[1])


def mm(a_MC: Tensor, b_NC: Tensor, spec: Spec) -> Tensor:
    """``a @ b.T`` of both operands after their casts, accumulated in their own dtype."""
    if spec.act is not None:
        a_MC = fake_quantize(a_MC, spec.act)
    return torch.mm(a_MC, fake_quantize(b_NC, spec).t())


REFERENCE_KERNELS = (
    Kernel("reference_linear", "linear", "*", "*", linear, priority=-100),
    Kernel("reference_embedding", "embedding", "*", "*", embedding, priority=-100),
    Kernel("reference_mm", "mm", "*", "*", mm, priority=-100),
)
