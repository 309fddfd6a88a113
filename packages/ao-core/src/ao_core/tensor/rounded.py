"""Activations as the format of a weight rounds them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.spec import ROW
from ao_core.tensor.activations import lost_rows, static_qparams
from ao_core.tensor.encoding import fake_quantize
from ao_core.tensor.qtensor import QTensor

__all__ = ["rounded_activations", "rounded_of_experts"]


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


def rounded_of_experts(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
    """The same for a weight (E, N, K), whose experts each have a static scale of their own.

    Nothing depends on the values of `offs`, so that it can be traced.

    Args:
        x: (M, K) with `offs`, or (E, M, K) without.
        w: the weight.
        offs: int32 (E,), the row after each expert's last; rows after all of them may be rounded in any way.

    Raises:
        UnsupportedOp: the scales of blocks share a static one, of which each expert has its own.
    """
    act = w.spec.act
    if act is None or not act.is_static:
        return rounded_activations(x, w)
    if not act.static:
        raise UnsupportedOp(
            f"grouped_linear of layout {w.spec.layout!r} while tracing: the scales of {act} share one that "
            "each expert has by itself, and which rows are whose is not known yet"
        )
    rows = x.reshape(-1, x.shape[-1])
    if offs is None:
        expert = torch.arange(len(rows), device=x.device) // x.shape[1]
    else:
        numbers = torch.arange(len(rows), device=x.device, dtype=offs.dtype)
        expert = torch.bucketize(numbers, offs, right=True).clamp(max=len(offs) - 1)
    scale, zero_point = (
        None if each is None else each.reshape(-1)[expert][:, None] for each in static_qparams(w)
    )
    lost = lost_rows(rows, act)
    by_row = replace(act, block=ROW, static=False)
    values = fake_quantize(torch.where(lost, 0, rows), by_row, scale, zero_point)
    return torch.where(lost, torch.nan, values).reshape(x.shape)
