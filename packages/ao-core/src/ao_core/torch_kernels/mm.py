"""Kernels of the torch band for matmuls of two dense operands: what `ComputeWeight` multiplies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.numerics import scale_to_float
from ao_core.records import Call, Kernel
from ao_core.spec import ROW, TENSOR, Spec
from ao_core.tensor.encoding import encode_parts
from ao_core.torch_kernels.devices import lacks_sm89
from ao_core.torch_kernels.linear import refused_by_int_mm

__all__ = ["MM_KERNELS"]

_FLOAT8 = ("f8e4m3", "f8e5m2")
#: what cuBLASLt and CUTLASS want the contracted dimension and the columns to be a multiple of
_STEP = 16


def scaled_mm(a_MC: Tensor, b_NC: Tensor, spec: Spec) -> Tensor:
    """Both operands in float8, scales per row or tensor (`aten._scaled_mm`); odd sizes are padded."""
    assert spec.act is not None
    a_codes, a_scale = _codes(a_MC, spec.act)
    b_codes, b_scale = _codes(b_NC, spec)
    n, (rows, columns) = len(b_NC), (-len(b_NC) % _STEP, -b_NC.shape[1] % _STEP)
    if rows or columns:
        a_codes, b_codes = _padded(a_codes, 0, columns), _padded(b_codes, rows, columns)
    if spec.block == TENSOR:
        scales = a_scale.reshape(()), b_scale.reshape(())
    else:
        scales = a_scale, F.pad(b_scale.reshape(1, -1), (0, rows), value=1.0)
    out = torch._scaled_mm(
        a_codes,
        b_codes.t(),
        *scales,
        out_dtype=a_MC.dtype,
        use_fast_accum=bool(spec.option("fast_accum", True)),
    )
    return out[:, :n] if rows else out


def _codes(x: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Codes in row-major order, and float32 scales."""
    parts = encode_parts(x, spec)
    return parts["qdata"].contiguous(), scale_to_float(parts["scale"])


def _padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    """With more rows and columns of zeros; padding knows no float8, but bytes."""
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


def _refuses_scaled_mm(call: Call) -> str | None:
    spec, act = call.spec, call.spec.act
    if act is None or act.dtype not in _FLOAT8 or spec.dtype not in _FLOAT8:
        return f"needs two operands in float8, found {spec}"
    if "f8e5m2" == act.dtype == spec.dtype:
        return "has no matmul of e5m2 with e5m2"
    if act.block != spec.block or spec.block not in (ROW, TENSOR):
        return "needs operands both per row, or both per tensor"
    if call.x_dtype != torch.bfloat16 and (spec.block == ROW or call.x_dtype != torch.float32):
        return f"gives bfloat16, or float32 where scales are per tensor, not {call.x_dtype}"
    if call.m == 0 or 0 in call.weight_shape:
        return "needs a matmul that is not empty"
    return None


def int_mm(a_MC: Tensor, b_NC: Tensor, spec: Spec) -> Tensor:
    """Both operands in int8, one scale per row, multiplied in int32 (`aten._int_mm`)."""
    assert spec.act is not None
    a_codes, a_scale = _codes(a_MC, spec.act)
    b_codes, b_scale = _codes(b_NC, spec)
    out = torch._int_mm(a_codes, b_codes.t()).float() * a_scale * b_scale.reshape(1, -1)
    return out.to(a_MC.dtype)


def _refuses_int_mm(call: Call) -> str | None:
    spec, act = call.spec, call.spec.act
    if act is None or (act.dtype, act.block, act.zero_point) != ("int8", ROW, "none"):
        return f"needs two operands in int8 with one scale per row, found {spec}"
    if (spec.dtype, spec.block, spec.zero_point) != ("int8", ROW, "none"):
        return f"needs two operands in int8 with one scale per row, found {spec}"
    return refused_by_int_mm(call)


MM_KERNELS = (
    Kernel("scaled_matmul", "mm", "*", "cuda", scaled_mm, 0, lacks_sm89, _refuses_scaled_mm),
    Kernel("int_matmul", "mm", "*", "*", int_mm, 0, refuses=_refuses_int_mm),
)
