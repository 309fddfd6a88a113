"""Activations as the format of a weight rounds them."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.tensor.activations import lost_rows, static_qparams
from ao_core.tensor.encoding import fake_quantize
from ao_core.tensor.qtensor import QTensor

__all__ = ["rounded_activations"]


def rounded_activations(x: Tensor, w: QTensor) -> Tensor:
    """Activations (…, K) quantized as the spec of the weight says, and back; x where it says nothing.

    Rows with NaN or inf become NaN.
    """
    if w.spec.act is None:
        return x
    # blocks of activations are those of the matrix (tokens, K), whatever the rank of x
    rows = x.reshape(-1, x.shape[-1])
    lost = lost_rows(rows, w.spec.act)
    if lost is None:
        return fake_quantize(rows, w.spec.act).reshape(x.shape)
    values = fake_quantize(torch.where(lost, 0, rows), w.spec.act, *static_qparams(w))
    return torch.where(lost, torch.nan, values).reshape(x.shape)
