"""`precision_telemetry`: right numbers, warnings by name, and nothing where it is off."""

from __future__ import annotations

import json
import math
import sys
import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from ao_core import quantize_
from ao_core.ext import ConfigError, MissingExtraError
from ao_core.ext.compute import Matmuls
from ao_float8 import (
    MXTrainingConfig,
    NonFiniteWarning,
    PrecisionRecord,
    StepWarning,
    UnderflowWarning,
    precision_telemetry,
)


def _model(recipe="float8/rowwise", k=32, n=16) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(k, n), nn.GELU(), nn.Linear(n, 8))
    quantize_(model, recipe)
    return model


def _step(model, x, scale=1.0):
    (model(x).square().sum() * scale).backward()


def _find(records, layer, matmul, tensor) -> PrecisionRecord:
    (record,) = [r for r in records if (r.layer, r.matmul, r.tensor) == (layer, matmul, tensor)]
    return record


def test_every_operand_of_every_matmul():
    model, x = _model(), torch.randn(5, 32)
    with precision_telemetry(model) as telemetry:
        _step(model, x)
        telemetry.step()
    assert {(r.matmul, r.tensor) for r in telemetry.records if r.layer == "0"} == {
        ("output", "input"),
        ("output", "weight"),
        ("grad_input", "weight"),
        ("grad_input", "grad_output"),
        ("grad_weight", "input"),
        ("grad_weight", "grad_output"),
    }
    assert len(telemetry.records) == 12
    assert telemetry.unobserved == ()
    record = _find(telemetry.records, "0", "output", "input")
    assert (record.step, record.elements, record.nonfinite) == (0, 160, 0)
    assert record.amax == x.abs().max().item()
    rows = x.abs().amax(1) / 448
    assert record.scale_max == pytest.approx(rows.max().item())
    assert record.scale_min == pytest.approx(rows.min().item())
    assert 28 < record.sqnr_db < 36


def test_one_warning_where_step_is_forgotten():
    model, x = _model(), torch.randn(5, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forgetful(every):
        with precision_telemetry(model, every=every):
            for _ in range(3):
                _step(model, x)
                optimizer.step()

    for every in (1, 3):
        with pytest.warns(StepWarning) as found:
            forgetful(every)
        assert [w.filename for w in found] == [__file__]
        assert "0: its weight was updated" in str(found[0].message)
    with precision_telemetry(model) as telemetry:  # warnings are errors here
        for _ in range(3):
            for _ in range(2):  # micro-batches
                _step(model, x)
            with torch.inference_mode():
                model(x)
            optimizer.step()
            telemetry.step()


def test_numbers_against_counting():
    """One scale per tensor in e4m3: 2**-9 of the scale is the least that is not zero, ties to even."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    quantize_(model, "float8/tensorwise")
    x = torch.tensor([[448.0, 1.0, 2.0**-9, 2.0**-10, 2.0**-11, 0.0]])
    with precision_telemetry(model) as telemetry:
        model(x)
        telemetry.step()
    record = _find(telemetry.records, "0", "output", "input")
    assert record.underflow_percent == pytest.approx(100 * 2 / 5)  # of those that are not zero
    assert record.saturation_percent == 0
    assert (record.scale_min, record.scale_max, record.amax) == (1, 1, 448)
    noise = 2.0**-20 + 2.0**-22
    signal = 448**2 + 1 + 2.0**-18 + noise
    assert record.sqnr_db == pytest.approx(10 * math.log10(signal / noise))


def test_saturation():
    """The scale that MX v1.0 takes for 7 leaves 6 the greatest value: 7 and 6.5 are beyond."""
    from dataclasses import replace

    model = nn.Sequential(nn.Linear(32, 4, bias=False))
    quantize_(model, MXTrainingConfig())
    floor = (("mx_mode", "floor"),)
    for layer in model:
        (output, *_) = layer.weight.matmuls
        act = replace(output.act, options=floor)
        layer.weight.matmuls = Matmuls(replace(output, act=act))
    x = torch.ones(1, 32)
    x[0, :2] = torch.tensor([7.0, -6.5])
    with precision_telemetry(model) as telemetry:
        model(x)
    record = _find(telemetry.records, "0", "output", "input")
    assert record.saturation_percent == pytest.approx(100 * 2 / 32)


def test_calls_of_a_step_add_up():
    model, x = _model(), torch.randn(5, 32)
    with precision_telemetry(model, every=2) as telemetry:
        for _ in range(5):
            _step(model, x)
            _step(model, 2 * x[:2])  # accumulated gradients
            telemetry.step()
    assert sorted({r.step for r in telemetry.records}) == [0, 2, 4]
    record = telemetry.records[0]
    assert record.elements == 7 * 32
    assert record.amax == max(x.abs().max(), 2 * x[:2].abs().max()).item()


def test_hooks_are_there_only_where_they_look():
    model, x = _model(), torch.randn(5, 32)

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    with precision_telemetry(model, every=2) as telemetry:
        assert hooks() == 2
        telemetry.step()
        assert hooks() == 0
        _step(model, x)
        telemetry.step()
        assert hooks() == 2
    assert hooks() == 0
    assert not telemetry.records


def _graphs(model, x) -> list[list[str]]:
    """The operations of the graphs of forward and backward."""
    graphs = []

    def record(module, inputs):
        graphs.append([str(n.target) for n in module.graph.nodes if n.op == "call_function"])
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=record)
    _step(torch.compile(model, fullgraph=True, backend=backend), x)
    torch._dynamo.reset()
    return graphs


def test_no_operation_in_the_graph_where_it_is_off():
    model, x = _model(), torch.randn(5, 32)
    before = _graphs(model, x)
    assert len(before) == 2
    assert sum(target == "aten.mm.default" for graph in before for target in graph) == 5
    with precision_telemetry(model, every=2) as telemetry:
        _step(model, x)
        telemetry.step()
        assert _graphs(model, x) == before  # between the steps that it looks at
    assert _graphs(model, x) == before


def test_compiled_models_are_looked_at_too():
    model, x = _model(), torch.randn(5, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    _step(compiled, x)
    with precision_telemetry(compiled, every=2) as telemetry:
        for _ in range(3):
            _step(compiled, x)
            telemetry.step()
    torch._dynamo.reset()
    assert sorted({r.step for r in telemetry.records}) == [0, 2]
    assert {r.layer for r in telemetry.records} == {"0", "2"}
    assert len(telemetry.records) == 24


def test_underflow_is_named_once():
    model = _model("float8/tensorwise")
    x = torch.randn(5, 32)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with precision_telemetry(model, underflow_percent=40) as telemetry:
            for _ in range(3):
                out = model(x)
                grad = torch.full_like(out, 1e-11)
                grad[0, 0] = 1.0
                out.backward(grad)
                telemetry.step()
    texts = [str(w.message) for w in found if w.category is UnderflowWarning]
    assert len(texts) == 1
    assert texts[0].startswith("2: grad_output of the matmul grad_input, step 0: 97.5%")
    assert "float8_fallback(model, '2')" in texts[0]


def test_nan_is_reported_with_the_layer():
    model, x = _model(), torch.randn(5, 32)
    x[1, 2] = torch.nan
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with precision_telemetry(model) as telemetry:
            _step(model, x)
    texts = [str(w.message) for w in found if w.category is NonFiniteWarning]
    assert (
        texts[0] == "0: input of the matmul output, step 0: 1 of 160 elements are NaN or infinite"
    )
    assert [text.partition(":")[0] for text in texts] == ["0", "2"]
    assert _find(telemetry.records, "0", "output", "input").nonfinite == 1
    assert math.isnan(_find(telemetry.records, "0", "output", "input").scale_max)


class _Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_lines_scalars_and_a_figure(tmp_path):
    model, x, writer = _model(), torch.randn(5, 32), _Writer()
    path = tmp_path / "run" / "telemetry.jsonl"
    with precision_telemetry(model, jsonl=path, tensorboard=writer) as telemetry:
        for _ in range(2):
            _step(model, x)
            telemetry.step()
            assert len(path.read_text().splitlines()) == len(telemetry.records)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["layer"] == "0"
    assert lines[0]["sqnr_db"] == telemetry.records[0].sqnr_db
    assert ("2/grad_weight/grad_output/underflow_percent", 0.0, 1) in writer.scalars
    assert len(writer.scalars) == 6 * len(telemetry.records)
    (axes,) = telemetry.plot().axes
    assert {line.get_label() for line in axes.lines} == {
        f"{layer}, {matmul}" for layer in "02" for matmul in ("grad_input", "grad_weight")
    }
    assert axes.get_ylabel() == "underflow_percent of grad_output"


def test_what_is_not_finite_in_json():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    quantize_(model, "float8/rowwise")
    with precision_telemetry(model) as telemetry:
        model(torch.ones(1, 4))
    (record, *_) = telemetry.records
    assert record.sqnr_db == math.inf
    assert json.loads(record.to_json())["sqnr_db"] == "inf"


def test_experts_are_named_as_not_looked_at():
    model = nn.ModuleDict({"linear": nn.Linear(8, 8)})
    model.register_parameter("experts", nn.Parameter(torch.randn(2, 8, 8)))
    quantize_(model, "float8/rowwise")
    with precision_telemetry(model) as telemetry:
        pass
    assert telemetry.unobserved == ("experts",)


def test_bad_arguments(tmp_path, monkeypatch):
    model = _model()
    with pytest.raises(ConfigError, match="every=0"), precision_telemetry(model, every=0):
        pass
    with pytest.raises(ConfigError, match="convert it first"), precision_telemetry(nn.Linear(4, 4)):
        pass
    with precision_telemetry(model) as telemetry:
        pass
    with pytest.raises(ConfigError, match="field='sqnr'"):
        telemetry.plot("sqnr")
    with pytest.raises(ConfigError, match="has no records"):
        telemetry.plot()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(MissingExtraError, match=r"ao-float8\[tensorboard\]"),
        precision_telemetry(model, tensorboard=tmp_path),
    ):
        pass
