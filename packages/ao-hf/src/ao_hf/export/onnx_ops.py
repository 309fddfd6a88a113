"""The quantization ops of torch in the words of ONNX; needs onnxscript."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset21 as op

__all__ = ["narrowed", "translations"]

ops: Any = torch.ops.quantized_decomposed
_TYPES = {
    (8, True): ir.DataType.INT8,
    (8, False): ir.DataType.UINT8,
    (4, True): ir.DataType.INT4,
    (4, False): ir.DataType.UINT4,
}
_INT8_STEPS = 255.0
_SMALLEST = torch.finfo(torch.float32).eps


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For `torch.onnx.export`: what each op of `SpelledLinear` becomes."""
    return {
        ops.dequantize_per_channel.default: _dequantize_per_channel,
        ops.dequantize_per_channel_group.default: _dequantize_per_channel_group,
        ops.choose_qparams_per_token_asymmetric.default: _choose_qparams_per_token,
        ops.quantize_per_token.default: _quantize_per_token,
        ops.dequantize_per_token.default: _dequantize_per_token,
    }


def _dequantize_per_channel(
    codes: Any, scales: Any, zero_points: Any, axis: int, low: int, high: int, dtype: int,
    out_dtype: int | None = None,
) -> Any:  # fmt: skip
    return op.DequantizeLinear(codes, scales, zero_points, axis=axis)


def _dequantize_per_channel_group(
    codes: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: int, group_size: int,
    output_dtype: int,
) -> Any:  # fmt: skip
    return op.DequantizeLinear(codes, scales, zero_points, axis=1, block_size=group_size)


def _choose_qparams_per_token(x: Any, dtype: int) -> Any:
    x = op.Cast(x, to=ir.DataType.FLOAT)
    zero = op.Constant(value_float=0.0)
    axes = op.Constant(value_ints=[-1])
    low = op.Min(op.ReduceMin(x, axes), zero)
    high = op.Max(op.ReduceMax(x, axes), zero)
    steps, least = op.Constant(value_float=_INT8_STEPS), op.Constant(value_float=_SMALLEST)
    scale = op.Max(op.Div(op.Sub(high, low), steps), least)
    first, last = op.Constant(value_float=-128.0), op.Constant(value_float=127.0)
    below, above = op.Div(low, scale), op.Div(high, scale)
    errors = op.Add(op.Add(first, below), op.Add(last, above))
    point = op.Where(op.Greater(errors, zero), op.Sub(first, below), op.Sub(last, above))
    point = op.Round(op.Clip(point, first, last))
    return scale, op.Cast(point, to=ir.DataType.INT64)


def _quantize_per_token(
    x: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: int
) -> Any:
    points = op.Cast(zero_points, to=ir.DataType.FLOAT)
    codes = op.Add(op.Div(op.Cast(x, to=ir.DataType.FLOAT), scales), points)
    ends = (op.Constant(value_float=float(low)), op.Constant(value_float=float(high)))
    return op.Cast(op.Clip(op.Round(codes), *ends), to=ir.DataType.INT8)


def _dequantize_per_token(
    codes: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: int, output_dtype: int
) -> Any:
    points = op.Cast(zero_points, to=ir.DataType.FLOAT)
    return op.Mul(op.Sub(op.Cast(codes, to=ir.DataType.FLOAT), points), scales)


def narrowed(model: ir.Model, bits: Mapping[str, tuple[int, bool]]) -> None:
    """Store codes and zero points in the narrowest integers that ONNX has, in place.

    Args:
        model: made with `translations`.
        bits: by the name of a tensor of codes: bits, and whether its integers have a sign.

    Raises:
        RuntimeError: codes are not in the model as integers.
    """
    nodes = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    if bits and not nodes:
        raise RuntimeError("torch.onnx folded the codes of all weights into dense ones")
    for node in nodes:
        codes, points = node.inputs[0], node.inputs[2]
        if codes is None or codes.name not in bits:
            raise RuntimeError(f"{node.name} dequantizes {codes}, which is no weight of the model")
        width, signed = bits[codes.name]
        dtype = _TYPES[(4 if width <= 4 else 8, signed)]
        _narrow(codes, dtype)
        values = None if points is None else points.const_value.numpy()
        if values is None or not values.any():
            node.resize_inputs(2)
            continue
        # equal zero points of several layers are one tensor, which may be of several widths now
        own = ir.Value(name=f"{codes.name}.zero_point", const_value=ir.Tensor(values))
        model.graph.register_initializer(own)
        _narrow(own, dtype)
        node.replace_input_with(2, own)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():
            del model.graph.initializers[name]


def _narrow(value: ir.Value, dtype: ir.DataType) -> None:
    assert value.const_value is not None
    values = value.const_value.numpy().astype(dtype.numpy())
    value.const_value = ir.Tensor(values, dtype=dtype, name=value.name)
    value.dtype, value.shape = dtype, value.const_value.shape
