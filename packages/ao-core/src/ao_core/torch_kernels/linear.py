"""Kernels of the torch band: matmuls that torch itself has for low-precision weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.layouts.int4_cpu import gather_codes
from ao_core.numerics import (
    E4M3,
    E5M2,
    choose_qparams,
    decode_float,
    quantize_affine,
    scale_to_float,
)
from ao_core.records import Call, Kernel
from ao_core.registry import registry
from ao_core.spec import ROW, TENSOR, Spec
from ao_core.tensor.activations import lost_rows, static_qparams
from ao_core.tensor.qtensor import QTensor
from ao_core.torch_kernels.devices import lacks_sm89

__all__ = ["LINEAR_KERNELS", "quantized_activations", "refused_by_int_mm"]

#: products of two int8 whose sum an int32 holds in any case: 2**31 - 1 over (-128)**2
LONGEST_INT_SUM = 131071


def _rows_only(call: Call, dtypes: tuple[str, ...]) -> str | None:
    """What the kernels on plain weights with one scale per row have in common."""
    spec = call.spec
    if spec.dtype not in dtypes:
        return f"needs weights of {' or '.join(dtypes)}, found {spec.dtype}"
    if len(call.weight_shape) != 2 or spec.block != ROW or spec.zero_point != "none":
        return f"needs a 2-D weight with one scale per row and no zero point, found {spec}"
    if isinstance(spec.scale_dtype, Spec):
        return "needs scales that are not quantized themselves"
    return None


def _rows(x: Tensor) -> Tensor:
    """X as a contiguous matrix; each op costs about a microsecond, so none where it is one already."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.is_contiguous() else x.contiguous()


def _finish(out_MN: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """A matmul that nobody else holds, with the bias, in the shape and dtype of the call."""
    if bias is not None:
        out_MN = out_MN.add_(bias)
    if out_MN.dtype != x.dtype:
        out_MN = out_MN.to(x.dtype)
    return out_MN if x.dim() == 2 else out_MN.reshape(*x.shape[:-1], out_MN.shape[-1])


# -- weight-only -----------------------------------------------------------------------------------


def _values(qdata: Tensor, x: Tensor) -> Tensor:
    """The values of int8 or float8 codes in x's dtype."""
    if qdata.dtype == torch.int8 or x.is_cuda:
        return qdata.to(x.dtype)
    # torch converts float8 on the CPU one element at a time; the arithmetic here is vectorized
    fmt = E4M3 if qdata.dtype == torch.float8_e4m3fn else E5M2
    return decode_float(qdata.view(torch.uint8), fmt).to(x.dtype)


def row_scaled_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Multiply by the codes' values, which x's dtype holds exactly, then by the scale of each row."""
    scale_N = w.scale.view(-1)
    out = F.linear(x, _values(w.qdata, x))
    if x.dtype != torch.float32:
        # scaled in float32, so that a bfloat16 result rounds once more only
        scaled = out.float() * scale_to_float(scale_N)
        return (scaled if bias is None else scaled + bias).to(x.dtype)
    scale_N = scale_to_float(scale_N)
    return out.mul_(scale_N) if bias is None else torch.addcmul(bias, out, scale_N)


def _refuses_row_scaled(call: Call) -> str | None:
    if call.spec.act is not None:
        return "does not quantize activations"
    if call.x_dtype not in (torch.float32, torch.bfloat16):
        return f"unscaled sums overflow {call.x_dtype}; needs float32 or bfloat16"
    return _rows_only(call, ("int8", "f8e4m3", "f8e5m2"))


def int8pack_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """`aten._weight_int8pack_mm`: reads each weight once, without a dense copy."""
    # torch 2.13's op crashes on rows at other addresses than multiples of 32 bytes, 16 for weights,
    # and takes no columns of a larger weight
    x_MK, w_NK = _rows(x), w.qdata if w.qdata.is_contiguous() else w.qdata.contiguous()
    if type(x_MK) is not Tensor:
        # traced, and a compiler would drop a clone
        x_MK = x_MK.flip(-1).flip(-1)
    elif x_MK.data_ptr() % 32:
        x_MK = x_MK.clone()
    if type(w_NK) is Tensor and w_NK.data_ptr() % 16:
        w_NK = w_NK.clone()
    return _finish(torch._weight_int8pack_mm(x_MK, w_NK, w.scale.view(-1)), x, bias)


def _refuses_int8pack(call: Call) -> str | None:
    if call.spec.act is not None:
        return "does not quantize activations"
    if call.x_dtype != torch.bfloat16:
        return f"is vectorized for bfloat16 activations only, found {call.x_dtype}"
    if call.spec.scale_dtype != "bfloat16":
        return f"needs scales in bfloat16, found {call.spec.scale_dtype}"
    if not 1 <= call.m <= 8:
        return f"pays off from 1 to 8 rows, found {call.m}"
    if 0 in call.weight_shape or call.weight_shape[-1] % 16:
        return f"reads rows in steps of 16 elements, found a weight of {call.weight_shape}"
    return _rows_only(call, ("int8",))


def int4pack_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """`aten._weight_int4pack_mm_for_cpu`; its float zero point stands for code 8."""
    scale = w.scale.to(torch.bfloat16)
    qparams = scale.new_zeros(*scale.shape, 2)
    qparams[..., 0] = scale
    if "zero_point" in w.part_names:
        qparams[..., 1] = (8 - w.zero_point.float()) * scale
    group = w.spec.block[-1]
    x_MK = _rows(x)
    out_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, w.qdata, group, qparams)
    return _finish(out_MN, x, bias)


def int4_cpu_embedding(ids: Tensor, w: QTensor) -> Tensor:
    """Gather and decode only the rows that are looked up."""
    rows = ids.reshape(-1)
    group = w.spec.block[-1]
    values = gather_codes(w.qdata, rows, w.stored_shape).float()
    zero_point = (
        w.zero_point[:, rows].t().repeat_interleave(group, 1) if "zero_point" in w.part_names else 8
    )
    scale = w.scale[:, rows].t().float().repeat_interleave(group, 1)
    return ((values - zero_point) * scale).to(w.dtype).reshape(*ids.shape, w.stored_shape[1])


def _refuses_int4pack(call: Call) -> str | None:
    if call.x_dtype != torch.bfloat16:
        return f"is vectorized for bfloat16 activations only, found {call.x_dtype}"
    if not 1 <= call.m <= 192:
        return f"pays off from 1 to 192 rows, found {call.m}"
    return None


# -- quantized activations -------------------------------------------------------------------------


def quantized_activations(x_MK: Tensor, w: QTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Activations as codes, scale and zero point, found for this call unless they are static.

    Args:
        x_MK: activations (M, K) after the input steps.
        w: the weight, whose `spec.act` is their format.

    Returns:
        The codes (M, K) in `DType.storage`; the scale (float32), one per block of `spec.act.block`; the zero
        point of the same shape, or None. Rows with NaN or inf have a scale or codes of NaN.
    """
    act = w.spec.act
    assert act is not None
    dtype = registry.dtypes.get(act.dtype)
    scale, zero_point = static_qparams(w)
    lost = lost_rows(x_MK, act)
    known = x_MK if lost is None else torch.where(lost, 0, x_MK)
    if scale is None:
        scale, zero_point = choose_qparams(known, dtype, act.block, act.zero_point, "float32")
    if lost is not None and dtype.kind == "float":
        known = torch.where(lost, torch.nan, x_MK)
    codes = quantize_affine(known, dtype, act.block, scale, zero_point)
    if lost is not None and dtype.kind != "float":  # integers have no NaN
        scale = torch.where(lost, torch.nan, scale)
    return codes.view(dtype.storage), scale, zero_point


def int_mm_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Quantize x to 8 bits, multiply in int32 (`aten._int_mm`), scale rows and columns."""
    x_MK = _rows(x)
    codes, x_scale, x_zero = quantized_activations(x_MK, w)
    w_KN = w.qdata.t()
    if x_zero is None:
        acc_MN = torch._int_mm(codes, w_KN).float()
    else:
        # the matmul wants int8: codes and zero point move down by 128 together
        ones = torch.ones(32 if x.is_cuda else 1, x_MK.shape[1], dtype=torch.int8, device=x.device)
        w_sums_N = torch._int_mm(ones, w_KN)[0].float()
        acc_MN = torch._int_mm((codes ^ 128).view(torch.int8), w_KN).float()
        acc_MN = acc_MN - (x_zero.float() - 128) * w_sums_N
    out = acc_MN * x_scale * scale_to_float(w.scale).reshape(1, -1)
    return _finish(out if bias is None else out + bias, x, None)


def _refuses_int_mm(call: Call) -> str | None:
    act = call.spec.act
    if act is None:
        return "is for activations quantized at run time"
    if (act.dtype, act.zero_point) not in (("int8", "none"), ("uint8", "int")):
        return f"needs activations in int8, or uint8 with zero points; found {act}"
    if not act.static and act.block != ROW:
        return f"needs one scale per token, or a static one; found {act}"
    return refused_by_int_mm(call) or _rows_only(call, ("int8",))


def refused_by_int_mm(call: Call) -> str | None:
    """Why `aten._int_mm` cannot multiply operands of these sizes, if so."""
    if call.m == 0 or 0 in call.weight_shape:
        return "needs a matmul that is not empty"
    if call.weight_shape[-1] == 1:
        return "gives wrong sums over a single element in torch 2.13"
    if call.weight_shape[-1] > LONGEST_INT_SUM:
        return (
            f"adds up {LONGEST_INT_SUM} products at most in int32, found K={call.weight_shape[-1]}"
        )
    if call.device == "cuda" and (call.m <= 16 or any(size % 8 for size in call.weight_shape)):
        return "on CUDA needs more than 16 rows, and N and K in multiples of 8"
    return None


def scaled_mm_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Quantize x to float8 per row or as a whole, multiply in float8 (`aten._scaled_mm`)."""
    x_MK = _rows(x)
    codes, x_scale, _ = quantized_activations(x_MK, w)
    w_scale = scale_to_float(w.scale)
    per_tensor = w.spec.block == TENSOR
    out = torch._scaled_mm(
        codes,
        w.qdata.t(),
        # a static scale beside one per row of the weight stands for each token
        x_scale.reshape(()) if per_tensor else x_scale.expand(x_MK.shape[0], 1).contiguous(),
        w_scale.reshape(()) if per_tensor else w_scale.reshape(1, -1),
        out_dtype=torch.bfloat16,
    )
    return _finish(out, x, bias)


def _refuses_scaled_mm(call: Call) -> str | None:
    act = call.spec.act
    if act is None:
        return "is for activations quantized at run time"
    if act.dtype not in ("f8e4m3", "f8e5m2") or call.spec.dtype not in ("f8e4m3", "f8e5m2"):
        return f"needs float8 weights and activations, found {call.spec}"
    if "f8e5m2" == act.dtype == call.spec.dtype:
        return "has no matmul of e5m2 with e5m2"
    if call.spec.block not in (ROW, TENSOR) or not (act.static or act.block == call.spec.block):
        return (
            "needs weights and activations both per row, or both per tensor; or static activations"
        )
    if act.zero_point != "none" or call.spec.zero_point != "none":
        return f"has no zero points, found {call.spec}"
    if call.x_dtype != torch.bfloat16:
        return f"rounds its result to bfloat16, which would lose precision in {call.x_dtype}"
    if call.m == 0 or any(size % 16 for size in call.weight_shape):
        return f"needs N and K in multiples of 16, found {call.weight_shape}"
    return None


LINEAR_KERNELS = (
    Kernel("row_scaled", "linear", "plain", "*", row_scaled_linear, 0, refuses=_refuses_row_scaled),
    Kernel("int8pack", "linear", "plain", "cpu", int8pack_linear, 1, refuses=_refuses_int8pack),
    Kernel("int4pack", "linear", "int4_cpu", "cpu", int4pack_linear, 1, refuses=_refuses_int4pack),
    Kernel("int4_cpu_rows", "embedding", "int4_cpu", "cpu", int4_cpu_embedding, 1),
    Kernel("int_mm", "linear", "plain", "*", int_mm_linear, 1, refuses=_refuses_int_mm),
    Kernel(
        "scaled_mm", "linear", "plain", "cuda", scaled_mm_linear, 1, lacks_sm89, _refuses_scaled_mm
    ),
)
