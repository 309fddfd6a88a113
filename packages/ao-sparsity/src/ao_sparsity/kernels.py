"""Products that torch itself has for 2:4 weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.numerics import scale_to_float
from ao_core.records import Call, Kernel
from ao_core.spec import WHOLE
from ao_core.tensor.qtensor import QTensor
from ao_core.torch_kernels.native import quantized_activations

__all__ = ["KERNELS", "cutlass_linear"]

_ROW = (1, WHOLE)
#: what the number of tokens is padded to a multiple of
_TOKENS = 16
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cutlass_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """`aten._sparse_semi_structured_mm` with values of 16 bits, or with int8 codes and their scales."""
    x_MK = x.reshape(-1, x.shape[-1])
    tokens = x_MK.shape[0]
    if w.spec.act is None:
        out = _product(w, x_MK)[:tokens]
    else:
        codes, x_scale, _ = quantized_activations(x_MK, w)
        sums_MN = _product(w, codes, torch.int32)[:tokens].float()
        out = sums_MN * x_scale * scale_to_float(w.scale).reshape(1, -1)
    out = out if bias is None else out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], -1)


def _product(w: QTensor, x_MK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The product x @ w.T (M, N) of stored numbers, for M filled up to a multiple of `_TOKENS`."""
    filled = F.pad(x_MK, (0, 0, 0, -x_MK.shape[0] % _TOKENS))
    out_NM: Tensor = torch._sparse_semi_structured_mm(
        w.qdata, w.parts["meta"], filled.t(), out_dtype=out_dtype
    )
    return out_NM.t()


def _accepts(call: Call) -> str | None:
    spec, act = call.spec, call.spec.act
    if call.m == 0:
        return "needs a product that is not empty"
    if spec.dtype in _DTYPES:
        if act is not None:
            return "quantizes no activations for values of 16 bits"
        wanted = _DTYPES[spec.dtype]
        return None if call.x_dtype == wanted else f"needs activations in {wanted}, as the weight"
    if (spec.block, spec.zero) != (_ROW, "none") or not isinstance(spec.scale_dtype, str):
        return f"needs one scale a row and no zero point, found {spec}"
    if act is None or (act.dtype, act.zero) != ("int8", "none"):
        return "needs activations in symmetric int8 beside int8 weights"
    if not act.static and act.block != _ROW:
        return f"needs a scale a token, or a static one; found {act}"
    return None


def _needs_ampere() -> str | None:
    """Why torch has no such products on this machine, if so."""
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    major, minor = torch.cuda.get_device_capability()
    return None if major == 8 else f"is built for sm_80 to sm_89, found sm_{major}{minor}"


KERNELS = (
    Kernel(
        "semi_structured_mm",
        "linear",
        "two_four_cutlass",
        "cuda",
        cutlass_linear,
        1,
        _needs_ampere,
        _accepts,
    ),
)
