"""Emulated matmuls in bfloat16, of two operands in bfloat16 whose rounded values it holds exactly.

Processors multiply bfloat16 several times as fast as float32, and sums are in float32 either way.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ao_core.compute.emulated import cast_values
from ao_core.numerics import may_be_compiled, scale_to_float
from ao_core.records import Call, DType, Kernel
from ao_core.registry import registry
from ao_core.spec import ROW, TENSOR, Spec
from ao_core.tensor.codec import decode_parts
from ao_core.tensor.encoding import encode_parts

__all__ = ["EMULATED_MM_KERNELS"]

#: products that are scaled at a time, so that caches hold them in float32
_CHUNK = 1 << 17


def bfloat16_mm(a_MK: Tensor, b_NK: Tensor, spec: Spec) -> Tensor:
    """``a @ b.T`` of both operands after their casts.

    Scales that are powers of two are multiplied in before. Others, of rows or tensors, are multiplied in
    afterwards: what they scale is rounded to bfloat16 then, as the output is.
    """
    a_values, a_scale = _values(a_MK, spec.act)
    b_values, b_scale = _values(b_NK, spec)
    out = torch.mm(a_values, b_values.t())
    if a_scale is None and b_scale is None:
        return out
    return _scaled(out, a_scale, b_scale)


def _scaled(out_MN: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
    """The products times the scales, in float32; on a CPU in place, some rows at a time."""
    m, n = out_MN.shape
    at_once = may_be_compiled(out_MN) or out_MN.device.type != "cpu"
    step = m if at_once else max(1, _CHUNK // max(1, n))
    for begin in range(0, m, max(1, step)):
        rows = slice(begin, begin + step)
        scaled = out_MN[rows].float()
        if a_scale is not None:
            scaled *= a_scale[rows] if len(a_scale) == m else a_scale
        if b_scale is not None:
            scaled *= b_scale.t()
        if step == m:
            return scaled.to(out_MN.dtype)
        out_MN[rows] = scaled
    return out_MN


def _values(x: Tensor, spec: Spec | None) -> tuple[Tensor, Tensor | None]:
    """What is multiplied, exact in bfloat16, and float32 scales for afterwards."""
    if spec is None:
        return x, None
    if spec.scale_dtype == "e8m0":
        return cast_values(x, spec).to(torch.bfloat16), None
    if spec.block == TENSOR and not x.is_contiguous() and x.t().is_contiguous():
        values, scale = _values(x.t(), spec)  # a transpose has the same scale: nothing is copied
        return values.t(), scale
    parts = encode_parts(x, spec)
    scale = parts["scale"]
    codes = {**parts, "scale": torch.ones_like(scale)}
    return decode_parts(codes, spec, tuple(x.shape), torch.bfloat16), scale_to_float(scale)


def _refuses(call: Call) -> str | None:
    if call.x_dtype != torch.bfloat16:
        return f"multiplies in bfloat16, not {call.x_dtype}"
    for operand in (call.spec, call.spec.act):
        reason = None if operand is None else _refuses_operand(operand)
        if reason:
            return reason
    return None


def _refuses_operand(spec: Spec) -> str | None:
    if not _is_exact(registry.dtypes.get(spec.dtype)):
        return f"bfloat16 does not hold all values of {spec.dtype}"
    if spec.zero_point != "none" or spec.static:
        return f"knows no zero points and no static scales, found {spec}"
    if spec.scale_dtype == "e8m0" or (
        spec.scale_dtype == "float32" and spec.block in (ROW, TENSOR)
    ):
        return None
    return f"needs scales that are powers of two, or float32 ones of rows or tensors, found {spec}"


@cache
def _is_exact(fmt: DType) -> bool:
    if fmt.kind not in ("int", "float") or fmt.bits > 8:
        return False
    values = fmt.decode(torch.arange(1 << fmt.bits, dtype=torch.uint8))
    return bool(torch.equal(values.nan_to_num(), values.bfloat16().float().nan_to_num()))


EMULATED_MM_KERNELS = (
    Kernel("bfloat16_matmul", "mm", "*", "*", bfloat16_mm, -50, refuses=_refuses),
)
