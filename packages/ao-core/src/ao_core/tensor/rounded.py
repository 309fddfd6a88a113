"""Activations as the format of a weight rounds them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ao_core.numerics import may_be_compiled
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
    if lost is None or _are_none(lost):
        return fake_quantize(rows, w.spec.act, *static_qparams(w)).reshape(x.shape)
    values = fake_quantize(torch.where(lost, 0, rows), w.spec.act, *static_qparams(w))
    return torch.where(lost, torch.nan, values).reshape(x.shape)


def _are_none(lost: Tensor) -> bool:
    """Whether there is no lost row, as far as asking takes less time than two passes over all rows."""
    return lost.device.type == "cpu" and not may_be_compiled(lost) and not bool(lost.any())


def rounded_of_experts(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
    """The same for a weight (E, N, K), whose experts each have a static scale of their own.

    Nothing depends on the values of `offs`, so that it can be traced.

    Args:
        x: (M, K) with `offs`, or (E, M, K) without.
        w: the weight.
        offs: int32 (E,), the row after each expert's last; rows after all of them may be rounded in any way.
    """
    act = w.spec.act
    if act is None or not act.is_static:
        return rounded_activations(x, w)
    rows = x.reshape(-1, x.shape[-1])
    if offs is None:
        expert = torch.arange(len(rows), device=x.device) // x.shape[1]
    else:
        numbers = torch.arange(len(rows), device=x.device, dtype=offs.dtype)
        expert = torch.bucketize(numbers, offs, right=True).clamp(max=len(offs) - 1)
    lost = ~rows.isfinite().all(-1, keepdim=True)
    known = torch.where(lost, 0, rows)
    scale, zero_point = (None if each is None else each.reshape(-1) for each in static_qparams(w))
    assert scale is not None
    if act.static:
        by_row = replace(act, block=ROW, static=False)
        point = None if zero_point is None else zero_point[expert][:, None]
        values = fake_quantize(known, by_row, scale[expert][:, None], point)
    else:  # the scales of blocks share the one that is static, which there is no format of rows for
        values = known
        for number, its in enumerate(scale.unbind()):
            of_expert = fake_quantize(known, act, its.reshape(1, 1))
            values = torch.where(expert[:, None] == number, of_expert, values)
    return torch.where(lost, torch.nan, values).reshape(x.shape)
