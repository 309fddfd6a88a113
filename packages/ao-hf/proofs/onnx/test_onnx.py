"""ONNX Runtime gives what the quantized model gives, from files of integer codes and standard ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch

import onnx
from ao_hf.export.logits import LogitsModel
from ao_hf.export.onnx import export_onnx

LINEARS = 8  # of a Llama with one layer
CODES = {
    "int8_weight_only": Counter(INT8=LINEARS),
    # the head stays at 8 bits; 7 layers have codes and zero points
    "int4_weight_only/g32-asymmetric": Counter(UINT4=2 * (LINEARS - 1), INT8=1),
    "int8_dynamic_activation_int8_weight/asymmetric": Counter(INT8=LINEARS),
    "int8_dynamic_activation_int4_weight": Counter(INT4=LINEARS - 1, INT8=1),
}
SHAPES = {"input_ids": {1: torch.export.Dim("sequence", min=2, max=64)}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", list(CODES))
def test_a_llama(recipe: str, make_llama: Callable[..., LogitsModel], tmp_path: Path) -> None:
    model, path = make_llama(recipe), tmp_path / "model.onnx"
    export_onnx(model, (torch.arange(12).reshape(2, 6),), path, dynamic_shapes=SHAPES)

    graph = onnx.load(path).graph
    kinds = Counter(onnx.TensorProto.DataType.Name(t.data_type) for t in graph.initializer)
    assert Counter({k: n for k, n in kinds.items() if "INT8" in k or "INT4" in k}) == CODES[recipe]
    assert {node.domain for node in graph.node} == {""}
    assert sum(node.op_type == "DequantizeLinear" for node in graph.node) == LINEARS

    options = onnxruntime.SessionOptions()
    # its fused matmul of 4-bit weights rounds activations to 8 bits unless it is told not to
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(path, options)
    for ids in (torch.arange(12).reshape(2, 6), torch.arange(18).reshape(2, 9)):
        found = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
        with torch.no_grad():
            expected = model(ids)
        # where an activation lies between two codes, the other one may be taken
        bound = 2e-2 if "activation" in recipe else 1e-5
        assert float((found - expected).norm() / expected.norm()) < bound
