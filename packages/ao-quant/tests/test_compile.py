"""`torch.compile` in one graph and without recompiling, and what `torch.export` makes of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ao_core import quantize_
from ao_core.testing.programs import aot_inductor


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _model(recipe):
    model = nn.Sequential(nn.Linear(40, 33), nn.GELU(), nn.Linear(33, 8)).eval()
    report = quantize_(model, recipe)
    assert len(report.with_status("changed")) == 2
    return model


def test_full_graph_once(recipe):
    model, counter = _model(recipe), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x, y = torch.randn(5, 40), torch.randn(5, 40)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(y), model(y))
    assert counter.frame_count == 1


def test_full_graph_once_in_bfloat16(default):
    # sizes for which a kernel on this device may choose a layout of its own
    model = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 32)).eval().bfloat16()
    quantize_(model, default)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(5, 256, dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


def test_full_graph_with_gradients_of_the_input(default):
    model, counter = _model(default), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        x = torch.randn(5, 40, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        compiled(x).square().sum().backward()
        model(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert counter.frame_count == 1


def test_full_graph_with_a_varying_batch(default):
    model, counter = _model(default), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for rows in (5, 7, 12):
            x = torch.randn(rows, 40)
            torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


LAYERS = {
    "embedding": (lambda: nn.Embedding(19, 40), lambda: torch.tensor([[1, 2], [18, 0]])),
    "conv": (lambda: nn.Conv2d(6, 8, 3), lambda: torch.randn(2, 6, 9, 7)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ["int8_weight_only", "int4_weight_only", "nf4_weight_only"])
def test_full_graph_of_other_layers(kind, name):
    make, inputs = LAYERS[kind]
    layer, counter = make(), CompileCounterWithBackend("aot_eager")
    quantize_(layer, name, lambda module, fqn: True)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    x = inputs()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["int8_weight_only", "int4_weight_only", "int8_dynamic_activation_int8_weight"]
)
def test_inductor(name, sqnr_db):
    model, counter = _model(name), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(5, 40)
            # a fused division may round an activation to the other neighbour
            assert sqnr_db(model(x), compiled(x)) > (40 if "dynamic" in name else 100)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["int8_weight_only", "int4_weight_only", "nf4_weight_only"])
def test_export(name):
    model, x = _model(name), torch.randn(5, 40)
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(copy.deepcopy(model), (x,), dynamic_shapes=({0: rows},))
    y = torch.randn(9, 40)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x), model(x))
        torch.testing.assert_close(exported.module()(y), model(y))


@pytest.mark.slow
def test_aot_inductor_package(tmp_path):
    names = ("int8_weight_only", "int4_weight_only")
    model = nn.Sequential(_model(names[0]), nn.Linear(8, 40), _model(names[1]))
    x = torch.randn(5, 40)
    with torch.no_grad():
        loaded = aot_inductor(model, (x,), tmp_path)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)
