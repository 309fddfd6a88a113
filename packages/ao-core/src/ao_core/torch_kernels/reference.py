"""The references of ao-core's ops: plain torch, any layout, any device, any shape, always right."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.compute.emulated import cast_values
from ao_core.compute.linear import cast_matmul
from ao_core.dispatch import select
from ao_core.errors import UnsupportedOp
from ao_core.layouts import Parts
from ao_core.numerics import error_sums
from ao_core.spec import Spec
from ao_core.tensor import cut
from ao_core.tensor.encoding import encode_parts, encode_reference
from ao_core.tensor.experts import by_expert, checked_ends, is_traced
from ao_core.tensor.matmuls import call_of
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.rounded import rounded_activations, rounded_of_experts

__all__ = [
    "embedding",
    "grouped_linear",
    "grouped_mm",
    "linear",
    "mm",
    "quantize",
    "quantize_both",
    "sums_of_rows",
]


def linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Quantize the activations as the spec says, dequantize the weight, multiply in x's dtype.

    Quantized float16 activations are multiplied in float32: the codes of numbers near the greatest float16
    stand for greater ones.
    """
    if w.spec.act is not None and x.dtype == torch.float16:
        wide = None if bias is None else bias.float()
        return F.linear(rounded_activations(x.float(), w), w.dequantize(torch.float32), wide).half()
    return F.linear(rounded_activations(x, w), w.dequantize(x.dtype), bias)


def grouped_linear(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
    """Expert by expert, each by the linear kernel for its share; while tracing, all at once."""
    if not is_traced(x):
        return by_expert(x, w, offs, w.shape[1], _linear_of_expert)
    dense = w.dequantize(x.dtype).transpose(-2, -1)
    if offs is None:
        return torch.bmm(rounded_of_experts(x, w, None), dense)
    used = torch.arange(x.shape[0], device=x.device) < offs[-1]
    rounded = rounded_of_experts(x, w, offs)
    return torch.where(used[:, None], torch._grouped_mm(rounded, dense, offs), 0)


def _linear_of_expert(rows: Tensor, expert: Tensor) -> Tensor:
    if isinstance(expert, QTensor):
        kernel = select(call_of("linear", rows, expert))
        return kernel.fn(rows, expert, None)  # type: ignore[no-any-return]
    return F.linear(rows, expert)


def embedding(ids: Tensor, w: QTensor) -> Tensor:
    """Dequantize only the rows that are looked up, where the layout can gather rows."""
    return _gather(w, ids.reshape(-1)).reshape(*ids.shape, w.shape[1])


def _gather(w: QTensor, rows: Tensor) -> Tensor:
    try:
        return cut.gather_rows(w, rows).dequantize()
    except UnsupportedOp:
        return w.dequantize().index_select(0, rows)


def sums_of_rows(x: Tensor, w: QTensor, step: int) -> Tensor:
    """`error_sums` of the rows that are compared; only those are dequantized, as in `embedding`."""
    if step == 1:
        return error_sums(x, w.dequantize())
    rows = torch.arange(0, x.shape[0], step, device=x.device)
    return error_sums(x.index_select(0, rows), _gather(w, rows))


def mm(a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """``a @ b.T`` of both operands after their casts, multiplied and accumulated in float32."""
    a_MK, b_NK = a.to(torch.float32), b.to(torch.float32)
    if spec.act is not None:
        a_MK = cast_values(a_MK, spec.act)
    return torch.mm(a_MK, cast_values(b_NK, spec).t()).to(a.dtype)


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None, spec: Spec) -> Tensor:
    """Expert by expert, each by the kernel of mm; while tracing, all rows for each expert."""
    if a.dim() == b.dim() == 3:
        pairs = zip(a.unbind(), b.unbind(), strict=True)
        return torch.stack([cast_matmul("mm", spec, *pair) for pair in pairs])
    assert offs is not None
    if b.dim() == 2:  # the contracted dimension is the one that offs cuts
        experts = _shares(offs, a.t(), b.t())
        return torch.stack(
            [cast_matmul("mm", spec, rows_a.t(), rows_b.t()) for rows_a, rows_b in experts]
        )
    shares = [rows for (rows,) in _shares(offs, a)]
    matmuls = [cast_matmul("mm", spec, rows, w) for rows, w in zip(shares, b.unbind(), strict=True)]
    if is_traced(a):
        return torch.stack(matmuls).sum(0)
    out = torch.cat(matmuls)
    return torch.cat([out, out.new_zeros(len(a) - len(out), out.shape[1])])


def _shares(offs: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The rows of each expert; while tracing, where nobody knows them, all with zeros for the others."""
    if not is_traced(offs):
        ends = checked_ends(offs, len(tensors[0]))
        for start, end in pairwise([0, *ends]):
            yield [x[start:end] for x in tensors]
        return
    rows = torch.arange(tensors[0].shape[0], device=offs.device)[:, None]
    starts = F.pad(offs[:-1], (1, 0))
    for first, after in zip(starts.unbind(), offs.unbind(), strict=True):
        yield [torch.where((rows >= first) & (rows < after), x, 0) for x in tensors]


def quantize(x: Tensor, spec: Spec) -> Parts:
    """What `Layout.encode` gives, by default codes and scales as `Spec` says."""
    return encode_reference(x, spec)


def quantize_both(x: Tensor, spec: Spec) -> tuple[Parts, Parts]:
    """One after the other, each by the best kernel for it."""
    return encode_parts(x, spec), encode_parts(x.t(), spec)
