"""ONNX Runtime gives what the quantized model gives, from files of integer codes and standard ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

import onnx
from ao_core import Spec, quantize_tensor
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


def session_of(path: Path, **settings: str) -> tuple[onnxruntime.InferenceSession, Counter[str]]:
    """A session of ONNX Runtime, and the ops that it made of the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # that what it fused runs on this machine only
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    for name, value in settings.items():
        options.add_session_config_entry(f"session.{name}", value)
    session = onnxruntime.InferenceSession(path, options)
    graph = onnx.load(options.optimized_model_filepath).graph
    return session, Counter(node.op_type for node in graph.node)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", list(CODES))
def test_a_llama(recipe: str, make_llama: Callable[..., LogitsModel], tmp_path: Path) -> None:
    model, path = make_llama(recipe), tmp_path / "model.onnx"
    export_onnx(model, (torch.arange(12).reshape(2, 6),), path, dynamic_shapes=SHAPES)

    graph = onnx.load(path).graph
    onnx.checker.check_model(path, full_check=True)
    kinds = Counter(onnx.TensorProto.DataType.Name(t.data_type) for t in graph.initializer)
    assert Counter({k: n for k, n in kinds.items() if "INT8" in k or "INT4" in k}) == CODES[recipe]
    assert {node.domain for node in graph.node} == {""}
    assert sum(node.op_type == "DequantizeLinear" for node in graph.node) == LINEARS
    weights = sum(len(t.raw_data) for t in graph.initializer)
    embedding = model.model.model.embed_tokens.weight.nbytes
    parameters = sum(p.numel() for p in model.parameters()) - embedding // 4
    bits = 8 * (weights - embedding) / parameters
    assert (8 < bits < 10) if "int4" not in recipe else (4 < bits < 7)

    # its matmul of codes rounds activations to 8 bits unless it is told not to
    session, ops = session_of(path, qdq_matmulnbits_accuracy_level="1")
    assert ops["MatMulNBits"] == LINEARS
    assert ops["DequantizeLinear"] == 0
    rounding, _ = session_of(path)
    for ids in (torch.arange(12).reshape(2, 6), torch.arange(18).reshape(2, 9)):
        given = {"input_ids": ids.numpy()}
        with torch.no_grad():
            expected = model(ids)
        found = torch.from_numpy(session.run(None, given)[0])
        # where an activation lies between two codes, the other one may be taken
        assert error(found, expected) < (2e-2 if "activation" in recipe else 1e-5)
        assert 1e-4 < error(torch.from_numpy(rounding.run(None, given)[0]), expected) < 5e-2


def quantized(dtype: str, group: int) -> tuple[nn.Linear, torch.Tensor]:
    """A layer with a bias, and its dense weight."""
    layer = nn.Linear(2 * group, 2 * group)
    dense = layer.weight.detach()
    spec = Spec(dtype, (1, group), zero_point="int" if dtype[0] == "u" else "none")
    layer.weight = nn.Parameter(quantize_tensor(dense, spec), requires_grad=False)
    return layer, dense


FUSED = [("uint4", group) for group in (16, 32, 64, 128, 256)]
FUSED += [(dtype, 32) for dtype in ("uint2", "int3", "uint8", "int8")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "group", "fused"),
    [*((*pair, True) for pair in FUSED), ("uint4", 48, False)],
)
def test_groups(dtype: str, group: int, fused: bool, tmp_path: Path) -> None:
    """Those of a size that is no power of two are dequantized at each call."""
    layer, dense = quantized(dtype, group)
    x, path = torch.randn(3, 2 * group), tmp_path / "model.onnx"
    export_onnx(layer, (x,), path)
    session, ops = session_of(path, qdq_matmulnbits_accuracy_level="1")
    assert (ops["MatMulNBits"], ops["DequantizeLinear"]) == ((1, 0) if fused else (0, 1))
    (name,) = (given.name for given in session.get_inputs())
    found = torch.from_numpy(session.run(None, {name: x.numpy()})[0])
    with torch.no_grad():
        assert error(found, layer(x)) < 1e-5
        assert 1e-3 < error(found, nn.functional.linear(x, dense, layer.bias)) < 0.6


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_is_called_twice_is_stored_once(tmp_path: Path) -> None:
    """ONNX Runtime does not fuse it, since two matmuls read its codes."""
    layer, _ = quantized("uint4", 32)
    x, path = torch.randn(3, 64), tmp_path / "model.onnx"
    model = nn.Sequential(layer, nn.ReLU(), layer)
    export_onnx(model, (x,), path)
    kinds = [t.data_type for t in onnx.load(path).graph.initializer if t.dims == [64, 64]]
    assert kinds == [onnx.TensorProto.UINT4]
    session, _ = session_of(path)
    (name,) = (given.name for given in session.get_inputs())
    with torch.no_grad():
        assert error(torch.from_numpy(session.run(None, {name: x.numpy()})[0]), model(x)) < 1e-5
