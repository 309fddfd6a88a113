"""Matmuls that torch itself has for 2:4 weights: CUTLASS for Ampere, and cuSPARSELt."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Call, Kernel, QTensor
from ao_core.ext import ROW
from ao_core.ext.kernels import lacks_capability, quantized_activations
from ao_core.ext.numerics import scale_to_float

__all__ = ["KERNELS", "cslt_linear", "cutlass_linear", "no_cusparselt"]

#: what the number of tokens is padded to a multiple of
_TOKENS = 16
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: (weight, x (M, K), dtype of the result) -> x @ w.T (M, N) of stored numbers
Matmul = Callable[[QTensor, Tensor, "torch.dtype | None"], Tensor]


def cutlass_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """`aten._sparse_semi_structured_mm` with values of 16 bits, or with int8 codes and their scales."""
    return _linear(x, w, bias, _cutlass)


def cslt_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """`aten._cslt_sparse_mm` with values of 16 bits, or with int8 codes and their scales."""
    return _linear(x, w, bias, _cslt)


def _cutlass(w: QTensor, x_MK: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    parts = w.parts
    out_NM: Tensor = torch._sparse_semi_structured_mm(
        parts["qdata"], parts["meta"], x_MK.t(), out_dtype=out_dtype
    )
    return out_NM.t()


def _cslt(w: QTensor, x_MK: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    out_MN: Tensor = torch._cslt_sparse_mm(
        w.qdata, x_MK.t(), out_dtype=out_dtype, transpose_result=True
    )
    return out_MN


def _linear(x: Tensor, w: QTensor, bias: Tensor | None, matmul: Matmul) -> Tensor:
    x_MK = x.reshape(-1, x.shape[-1])
    tokens = x_MK.shape[0]
    filled = F.pad(x_MK, (0, 0, 0, -tokens % _TOKENS))
    if w.spec.act is None:
        out = matmul(w, filled, None)[:tokens]
    else:
        codes, x_scale, _ = quantized_activations(filled, w)
        # a static scale is one for all tokens
        sums_MN = matmul(w, codes, torch.int32).float() * x_scale
        out = (sums_MN * scale_to_float(w.scale).reshape(1, -1))[:tokens]
    out = out if bias is None else out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], -1)


def _refuses(call: Call) -> str | None:
    spec, act = call.spec, call.spec.act
    if call.m == 0:
        return "needs a matmul that is not empty"
    if spec.dtype in _DTYPES:
        if act is not None:
            return "quantizes no activations for values of 16 bits"
        wanted = _DTYPES[spec.dtype]
        return None if call.x_dtype == wanted else f"needs activations in {wanted}, as the weight"
    if (spec.block, spec.zero_point) != (ROW, "none") or not isinstance(spec.scale_dtype, str):
        return f"needs one scale per row and no zero point, found {spec}"
    if act is None or (act.dtype, act.zero_point) != ("int8", "none"):
        return "needs activations in symmetric int8 beside int8 weights"
    if not act.static and act.block != ROW:
        return f"needs one scale per token, or a static one; found {act}"
    return None


def _no_cutlass() -> str | None:
    """Why torch has no such matmuls on this machine; None where it has. It builds them for Ampere and Ada."""
    return lacks_capability((8, 0), (8, 9))


def no_cusparselt() -> str | None:
    """Why cuSPARSELt cannot multiply on this machine; None where it can."""
    if reason := lacks_capability((8, 0)):
        return reason
    return None if torch.backends.cusparselt.is_available() else "this torch has no cuSPARSELt"


KERNELS = (
    Kernel(
        "semi_structured_mm",
        "linear",
        "two_four_cutlass",
        "cuda",
        cutlass_linear,
        1,
        _no_cutlass,
        _refuses,
    ),
    Kernel(
        "cusparselt_mm",
        "linear",
        "two_four_cslt",
        "cuda",
        cslt_linear,
        2,
        no_cusparselt,
        _refuses,
    ),
)
