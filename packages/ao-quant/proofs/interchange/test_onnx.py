"""MatMulNBits of ONNX Runtime computes with what is written, and what its quantizer writes is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ao_core import Spec, quantize_tensor
from ao_core.ext.saving import write_checkpoint
from ao_quant.interchange import convert_checkpoint
from ao_quant.interchange.sources import open_foreign

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


def _weight(path, size):
    """What ONNX Runtime multiplies the rows of the identity by."""
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: np.eye(size, dtype=np.float32)}
    return torch.from_numpy(session.run(None, given)[0]).t()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [256, 200])
def test_onnx_runtime_multiplies_by_what_is_written(
    bits, size, symmetric, columns, tmp_path
) -> None:
    name, zero = (f"int{bits}", "none") if symmetric else (f"uint{bits}", "int")
    spec = Spec(name, (1, size), "float32", zero, "plain" if bits == 8 else "packed")
    tensor = quantize_tensor(torch.randn(48, columns), spec)
    write_checkpoint([("m.weight", tensor)], tmp_path / "ao")
    told = convert_checkpoint(tmp_path / "ao", tmp_path / "onnx", "onnx")
    assert told.verdict == "bytes equal"
    found = _weight(tmp_path / "onnx/model.onnx", columns)
    assert torch.allclose(found, tensor.dequantize(torch.float32), rtol=2**-20, atol=0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_its_quantizer_writes_is_read(bits, symmetric, tmp_path) -> None:
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    weight = onnx.numpy_helper.from_array(torch.randn(200, 48).numpy(), "w")
    shapes = {"x": ["n", 200], "y": ["n", 48]}
    x, y = (onnx.helper.make_tensor_value_info(n, 1, shape) for n, shape in shapes.items())
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "m")
    graph = onnx.helper.make_graph([node], "g", [x], [y], [weight])
    opsets = [onnx.helper.make_opsetid("", 21)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    made = quantizer.MatMulNBitsQuantizer(model, block_size=32, is_symmetric=symmetric, bits=bits)
    made.process()
    path = tmp_path / "a.onnx"
    made.model.save_model_to_file(str(path))
    (read,) = open_foreign(path).reading.weights.values()
    tensor = read.make()
    assert torch.allclose(_weight(path, 200), tensor.dequantize(torch.float32), rtol=2**-20, atol=0)
