"""Kernels for the layout `two_four`: matmuls of a few rows from packed weights, and the dense weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, DType, Kernel, QTensor, Spec
from ao_core.ext import NO_SCALE, Parts, registry
from ao_core.ext.kernels import decode_reference
from ao_core.ext.numerics import full_block, may_be_compiled
from ao_kernels.cpu.block_sparse import SCALES
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.linear import DTYPES

__all__ = ["TWO_FOUR_KERNELS", "dequantize_two_four", "group_of", "two_four_linear"]

#: rows of activations beyond which a dense matmul with the expanded weight is faster
MOST_ROWS = 24
#: formats whose codes the matmul reads as they are
READ = ("bf16", "fp16", "fp32", "int8", "int4")
#: groups that share a scale are read in windows of so many columns
WINDOW = 32


def two_four_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """The matmul, with weights read as they are packed: activations are picked by their places."""
    parts, group = w.parts, group_of(w.spec, w.stored_shape)
    out: Tensor = torch.ops.ao_kernels.two_four_linear(
        x, parts["qdata"], parts["index"], parts.get("scale"), bias, group
    )
    return out


def dequantize_two_four(
    parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Dense values of `shape`, bit for bit those of the reference."""
    if may_be_compiled(parts["qdata"]):
        return decode_reference(parts, spec, shape, dtype)
    fmt, qdata, table = registry.dtypes.get(spec.dtype), parts["qdata"], None
    if fmt.bits <= 8:
        codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
        qdata, table = qdata.view(torch.uint8), fmt.decode(codes)
    dense: Tensor = torch.ops.ao_kernels.two_four_dequantize(
        qdata, parts["index"], parts.get("scale"), table, shape[-1], group_of(spec, shape), dtype
    )
    return dense


def group_of(spec: Spec, shape: tuple[int, ...]) -> int:
    """Columns that share a scale; all of them where there is none."""
    return shape[-1] if spec.scale_dtype == NO_SCALE else full_block(spec.block, shape)[-1]


def _unfit_scale(spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
    """Why the C++ code cannot take such scales."""
    if dtype.bits > 8:
        return None
    if spec.zero_point != "none":
        return f"has no zero points, and this format has zero_point={spec.zero_point!r}"
    if spec.scale_dtype not in SCALES:
        return f"has scales in {', '.join(SCALES)}, not {spec.scale_dtype}"
    *rows, group = full_block(spec.block, shape)
    if group < shape[-1] and group % WINDOW:
        return f"has groups of whole multiples of {WINDOW} columns, found {group}"
    one = group >= shape[-1] and tuple(rows) == shape[:-1]
    if not one and any(extent != 1 for extent in rows):
        return f"has scales of single rows or one for all, found blocks of {spec.block}"
    return None


def _refuses_linear(call: Call) -> str | None:
    dtype = registry.dtypes.get(call.spec.dtype)
    if dtype.name not in READ:
        return f"reads {', '.join(READ)}, not {dtype.name}"
    if call.x_dtype not in DTYPES:
        return f"needs activations in float32, bfloat16 or float16, found {call.x_dtype}"
    if len(call.weight_shape) != 2 or 0 in call.weight_shape:
        return f"needs a weight (N, K) that is not empty, found {call.weight_shape}"
    if call.spec.act is not None:
        return "does not quantize activations: with an expanded weight that takes less time"
    if call.m > MOST_ROWS:
        return (
            f"is for {MOST_ROWS} rows at most, found {call.m}: an expanded weight takes less time"
        )
    return _unfit_scale(call.spec, call.weight_shape, dtype)


def _refuses_dequantize(call: Call) -> str | None:
    dtype = registry.dtypes.get(call.spec.dtype)
    if call.x_dtype not in DTYPES:
        return f"writes float32, bfloat16 and float16, not {call.x_dtype}"
    if dtype.bits < 8 and dtype.bits != 4:
        return f"reads codes of 4 and 8 bits and dense values, not of {dtype.bits}"
    if len(call.weight_shape) < 2 or 0 in call.weight_shape:
        return f"needs a tensor of rows that is not empty, found {call.weight_shape}"
    return _unfit_scale(call.spec, call.weight_shape, dtype)


def _describe(call: Call) -> str:
    return f"{isa()}, weights read as they are packed"


TWO_FOUR_KERNELS = (
    Kernel(
        "cpu_two_four_linear", "linear", "two_four", "cpu", two_four_linear, 50, unavailable,
        _refuses_linear, _describe,
    ),
    Kernel(
        "cpu_dequantize_two_four", "dequantize", "two_four", "cpu", dequantize_two_four, 50, unavailable,
        _refuses_dequantize,
    ),
)  # fmt: skip
