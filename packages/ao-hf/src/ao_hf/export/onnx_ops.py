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
    """Store codes and zero points in the narrowest integers that ONNX has, in place, as matmuls take them.

    A matmul of ONNX takes the weight as (K, N). Codes are stored so where nothing but matmuls reads them:
    ONNX Runtime fuses a `DequantizeLinear` of groups only with a matmul right behind it.

    Args:
        model: made with `translations`.
        bits: by the name of a tensor of codes: bits, and whether its integers have a sign.

    Raises:
        RuntimeError: codes are not in the model as integers.
    """
    readers: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node.op_type == "DequantizeLinear":
            codes = node.inputs[0]
            if codes is None or codes.name not in bits:
                raise RuntimeError(
                    f"{node.name} dequantizes {codes}, which is no weight of the model"
                )
            readers.setdefault(codes.name, []).append(node)
    if bits and not readers:
        raise RuntimeError("torch.onnx folded the codes of all weights into dense ones")
    for name, nodes in readers.items():
        width, signed = bits[name]
        _store(model, name, nodes, _TYPES[(4 if width <= 4 else 8, signed)])
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():
            del model.graph.initializers[name]


def _store(model: ir.Model, name: str, nodes: list[ir.Node], dtype: ir.DataType) -> None:
    """One weight, which all `nodes` dequantize: a layer that is called twice has two."""
    transposed = all(_is_transposed(node.outputs[0]) for node in nodes)

    def own(part: str, value: ir.Value | None, dtype: ir.DataType | None = None) -> Any:
        """A tensor of this weight alone; equal tensors of several layers are one in the model."""
        if value is None or value.const_value is None:
            return None
        array = value.const_value.numpy()
        array = array if dtype is None else array.astype(dtype.numpy())
        array = array.T.copy() if transposed else array
        tensor = ir.Tensor(array, dtype=dtype or value.const_value.dtype, name=f"{name}{part}")
        made = ir.Value(name=tensor.name, const_value=tensor, shape=tensor.shape)
        made.dtype = tensor.dtype
        return made

    codes, scale, points = nodes[0].inputs
    inputs = [own("", codes, dtype), own(".scale", scale), own(".zero_point", points, dtype)]
    if inputs[2] is None or not inputs[2].const_value.numpy().any():
        inputs.pop()
    del model.graph.initializers[name]  # of the same name as the new one
    for value in inputs:
        model.graph.register_initializer(value)
    for node in nodes:
        node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        if transposed:
            node.attributes["axis"] = ir.AttrInt64("axis", 1 - node.attributes["axis"].as_int())
            _read_transposed(model, node.outputs[0])


def _is_transposed(dense: ir.Value) -> bool:
    """Whether all that reads a dense weight transposes it."""
    return bool(dense.uses()) and all(
        (node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0])
        or (node.op_type == "Gemm" and index == 1 and node.attributes["transB"].as_int() == 1)
        for node, index in dense.uses()
    )


def _read_transposed(model: ir.Model, dense: ir.Value) -> None:
    """What transposed a weight takes it as it is."""
    if dense.shape is not None:
        dense.shape = ir.Shape(reversed(dense.shape.dims))
    for node, _ in dense.uses():
        if node.op_type == "Gemm":
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
            continue
        ir.convenience.replace_all_uses_with(node.outputs[0], dense)
        model.graph.remove(node, safe=True)
