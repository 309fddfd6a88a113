"""The kernels for weights on a trellis: the search for codes, matmuls, and dense values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext import ROW, Parts
from ao_core.ext.kernels import neutral
from ao_core.ext.numerics import TRELLIS_MULTIPLIERS, trellis_values
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.linear import DTYPES

__all__ = ["TRELLIS_KERNELS", "dequantize", "encode", "linear"]

#: rows of activations from which on weights are decoded to a dense part of the matrix beforehand
DENSE_ROWS = 33
#: rows of the weight in such a part
_SLAB = 1024


@lru_cache(maxsize=1)
def _kept_table() -> Tensor:
    with neutral():
        return torch.tensor(trellis_values(), dtype=torch.int8, device="cpu")


def _table() -> Tensor:
    """Values of states; in a graph a constant of its own."""
    if torch.compiler.is_compiling():
        return torch.tensor(trellis_values(), dtype=torch.int8, device="cpu")
    return _kept_table()


def _bits(spec: Spec) -> int:
    return int(spec.dtype.removeprefix("int"))


def encode(x: Tensor, bits: int, count: int | None = None) -> Tensor:
    """The op "encode_trellis"."""
    count = x.shape[-1] if count is None else count
    codes: Tensor = torch.ops.ao_kernels.trellis_encode(
        x, _table(), TRELLIS_MULTIPLIERS[bits], bits, count
    )
    return codes


def dequantize(parts: Parts, spec: Spec, shape: tuple[int, ...], out_dtype: torch.dtype) -> Tensor:
    """The op "dequantize", of a matrix."""
    bits = _bits(spec)
    out: Tensor = torch.ops.ao_kernels.trellis_dequantize(
        parts["qdata"], parts["scale"], _table(), TRELLIS_MULTIPLIERS[bits], bits, *shape, out_dtype
    )
    return out


def linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """The op "linear": weights are decoded in registers, or for many rows of x a part of them at a time."""
    bits, rows = _bits(w.spec), w.stored_shape[0]
    if x[..., 0].numel() < DENSE_ROWS:
        out: Tensor = torch.ops.ao_kernels.trellis_linear(
            x, w.qdata, w.scale, bias, _table(), TRELLIS_MULTIPLIERS[bits], bits, rows
        )
        return out
    return _linear_of_parts(x, w, bias)


def _linear_of_parts(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """The matmul with dense weights, of some rows at a time."""
    rows, columns = w.stored_shape
    y = x.new_empty((*x.shape[:-1], rows))
    x_MK, y_MN = x.reshape(-1, columns), y.view(-1, rows)
    for start in range(0, rows, _SLAB):
        stop = min(start + _SLAB, rows)
        parts = {
            "qdata": w.qdata[start // 128 : -(-stop // 128)],
            "scale": w.scale[start:stop],
        }
        dense = dequantize(parts, w.spec, (stop - start, columns), x.dtype)
        some = torch.mm(x_MK, dense.t())
        y_MN[:, start:stop] = some if bias is None else some + bias[start:stop]
    return y


def _refuses_parts(spec: Spec, shape: tuple[int, ...]) -> str | None:
    if len(shape) != 2 or spec.block != ROW or 0 in shape:
        return f"needs a matrix with one scale per row, found {spec} of {shape}"
    if spec.scale_dtype not in ("float32", "bfloat16", "float16"):
        return f"needs scales in float32, bfloat16 or float16, found {spec.scale_dtype}"
    return None


def _refuses_linear(call: Call) -> str | None:
    if call.x_dtype not in DTYPES:
        return f"needs activations in float32, bfloat16 or float16, found {call.x_dtype}"
    if call.spec.act is not None:
        return "does not quantize activations"
    return _refuses_parts(call.spec, call.weight_shape)


def _refuses_dequantize(call: Call) -> str | None:
    if call.x_dtype not in DTYPES:
        return f"gives float32, bfloat16 and float16, not {call.x_dtype}"
    return _refuses_parts(call.spec, call.weight_shape)


def _refuses_encode(call: Any) -> str | None:
    if call.shape[1] % 2 or not 12 <= call.shape[1] <= 4096:
        return f"has rings of an even number of places from 12 to 4096, found {call.shape[1]}"
    return None


def _describe(call: Call) -> str:
    few = call.m < DENSE_ROWS
    how = (
        "weights decoded as they are read" if few else "a part of the weights made dense at a time"
    )
    return f"{isa()}, {how}"


TRELLIS_KERNELS = (
    Kernel(
        "cpu_trellis_encode", "encode_trellis", "trellis", "cpu", encode, 50, unavailable,
        _refuses_encode,
    ),
    Kernel(
        "cpu_trellis_dequantize", "dequantize", "trellis", "cpu", dequantize, 50, unavailable,
        _refuses_dequantize,
    ),
    Kernel(
        "cpu_trellis_linear", "linear", "trellis", "cpu", linear, 50, unavailable, _refuses_linear,
        _describe,
    ),
)  # fmt: skip
