"""The kernels of `linear` and `dequantize` for weights on a trellis."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext import ROW, Parts
from ao_kernels.triton.shared.device import capturing, current_device, unavailable
from ao_kernels.triton.shared.dtypes import ELEMENTS, INPUTS
from ao_kernels.triton.shared.known_answer import MATMUL, Sample, every_code, noise, proven
from ao_kernels.triton.trellis import op

__all__ = ["MOST_ROWS", "TRELLIS_KERNELS", "trellis_dequantize", "trellis_linear"]

#: up to so many rows of activations, weights are decoded for each tile of them; not measured
MOST_ROWS = 64
_SCALES = ("float32", "bfloat16", "float16")
#: a weight of a sample: two rings, the last one not full
_SMALL = (140, 72)


def _bits(spec: Spec) -> int:
    return int(spec.dtype.removeprefix("int"))


def trellis_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Multiply by weights that are decoded in registers."""
    out: Tensor = op.linear(x, w.qdata, w.scale, bias, _bits(w.spec), w.stored_shape[0])
    return out


def trellis_dequantize(
    parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Dense values of `shape`, bit for bit those of the layout."""
    out: Tensor = op.dequantize(parts["qdata"], parts["scale"], _bits(spec), *shape, dtype)
    return out


def _refuses(spec: Spec, shape: tuple[int, ...]) -> str | None:
    if len(shape) != 2 or spec.block != ROW or spec.scale_dtype not in _SCALES:
        return f"needs a matrix with one scale per row in {', '.join(_SCALES)}, found {spec} of {shape}"
    # the layout is ao-core's, so this is where a weight becomes the kernel's: before its first launch
    if not capturing(device := current_device()):
        op.prepare(device)
    return None


def _refuses_linear(call: Call) -> str | None:
    if call.x_dtype not in ELEMENTS:
        return f"needs activations in bfloat16 or float16, found {call.x_dtype}"
    if call.spec.act is not None:
        return "does not quantize activations"
    if call.m > MOST_ROWS:
        return f"is for up to {MOST_ROWS} rows, found {call.m}: decoding once is cheaper"
    return _refuses(call.spec, call.weight_shape)


def _refuses_dequantize(call: Call) -> str | None:
    if call.x_dtype not in INPUTS:
        return f"writes float32, bfloat16 and float16, not {call.x_dtype}"
    return _refuses(call.spec, call.weight_shape)


def _linear_sample(call: Call) -> Sample:
    m = op.block_of_rows(call.m)

    def arguments() -> tuple[object, ...]:
        return noise((m, _SMALL[1]), call.x_dtype), every_code(call.spec, _SMALL), None

    return Sample((repr(call.spec), call.x_dtype, m), arguments, MATMUL)


def _dequantize_sample(call: Call) -> Sample:
    assert call.x_dtype is not None

    def arguments() -> tuple[object, ...]:
        w = every_code(call.spec, _SMALL)
        return w.parts, w.spec, _SMALL, call.x_dtype

    return Sample((repr(call.spec), call.x_dtype), arguments)


def _describe(call: Call) -> str:
    return f"{op.block_of_rows(call.m)} rows by {op.BLOCK_N} of the weight, sums in float32"


TRELLIS_KERNELS = (
    Kernel(
        "triton_trellis_linear", "linear", "trellis", "cuda", trellis_linear, 50, unavailable,
        proven("linear", trellis_linear, _refuses_linear, _linear_sample), _describe,
    ),
    Kernel(
        "triton_trellis_dequantize", "dequantize", "trellis", "cuda", trellis_dequantize, 50,
        unavailable, proven("dequantize", trellis_dequantize, _refuses_dequantize, _dequantize_sample),
    ),
)  # fmt: skip
