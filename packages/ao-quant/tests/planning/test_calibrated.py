"""`plan` with candidates that need data, and by the outputs of layers on data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ao_quant
from ao_core import quantize_, save_model
from ao_core.ext import ConfigError
from ao_quant import QuantizationPlan

CALIBRATED = ("int8_weight_only", "gptq/int4-g128", "imatrix/int4-g128", "int2-g32")


def size_on_disk(model, folder):
    save_model(model, folder)
    return sum(file.stat().st_size for file in folder.glob("model*"))


def inputs(columns=256):
    """Correlated inputs of which some channels are large."""
    mix = torch.eye(columns) + torch.randn(columns, columns) / 8
    mix[:, ::16] *= 8
    return [torch.randn(200, columns) @ mix for _ in range(2)]


def test_calibrated_candidates_win_and_the_budget_holds(tmp_path):
    dense = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 128)).eval()
    data = inputs()
    for measure, arguments in (("layer", {}), ("output", {"sample": data[0]})):
        found = ao_quant.plan(
            dense, budget="34kB", candidates=CALIBRATED, data=data, measure=measure, **arguments
        )
        without = ao_quant.plan(
            dense,
            budget="34kB",
            candidates=("int8_weight_only", "int4-g128", "int2-g32"),
            data=data if measure == "layer" else None,
            measure=measure,
            **arguments,
        )
        assert 0.02 < found.error / without.error < 0.7
        assert "gptq/int4_weight_only" in str(found)
        made = copy.deepcopy(dense)
        report = quantize_(made, found, data=data)
        assert size_on_disk(made, tmp_path / measure) <= found.bytes <= 34_000
        assert any(record.damping for record in report.with_status("changed"))
    again = QuantizationPlan.from_json(found.to_json())
    assert again.hash == found.hash


def test_the_layer_measure_is_the_error_of_the_outputs():
    layer, data = nn.Sequential(nn.Linear(256, 16, bias=False)).eval(), inputs()
    found = ao_quant.plan(layer, bits=3.5, candidates=["int3-g64"], data=data, measure="layer")
    x, made = torch.cat(data), copy.deepcopy(layer)
    quantize_(made, "int3-g64")
    noise, signal = ((y**2).sum().item() for y in (made(x).detach() - layer(x), layer(x)))
    assert found.error == pytest.approx(noise / signal, rel=1e-3)


def gated():
    """A model whose first layer counts more for the answer than its errors say, and whose last one less."""
    dense = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 128), nn.Linear(128, 64))
    with torch.no_grad():
        dense[2].weight *= 6
        dense[3].weight[:, 64:] *= 0.02
    return dense.eval()


def test_gradients_predict_what_the_answer_loses():
    """For each candidate of each weight, the error of the answer that was measured."""
    dense, data = gated(), inputs()
    arguments = {"bits": 6.0, "candidates": CALIBRATED, "data": data}
    predicted = ao_quant.plan(dense, **arguments)
    assert predicted.measure == "output"
    measured = ao_quant.plan(dense, measure="output", sample=torch.cat(data), **arguments)
    for one, other in zip(predicted.choices, measured.choices, strict=True):
        for guess, truth in zip(one.options[1:], other.options[1:], strict=True):
            assert guess.config == truth.config
            assert 0.4 < guess.error / truth.error < 2.5, (one.fqn, guess, truth)
    for parameter in dense.parameters():
        assert parameter.grad is None


def test_the_budget_holds_for_calibrated_candidates_by_gradients(tmp_path):
    dense, data = gated(), inputs()
    found = ao_quant.plan(dense, budget="45kB", candidates=CALIBRATED, data=data, measure="output")
    made = copy.deepcopy(dense)
    quantize_(made, found, data=data)
    assert size_on_disk(made, tmp_path) <= found.bytes <= 45_000
    by_layer = ao_quant.plan(
        dense, budget="45kB", candidates=CALIBRATED, data=data, measure="layer"
    )
    other = copy.deepcopy(dense)
    quantize_(other, by_layer, data=data)
    x = torch.cat(data)
    errors = [(model(x) - dense(x)).square().mean().item() for model in (made, other)]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"candidates": ["gptq/int4-g128"]}, "data=None.*plan with these candidates"),
        ({"candidates": ["int8_weight_only"], "measure": "layer"}, "data=None.*measure='layer'"),
        (
            {"data": [torch.ones(2, 256)], "measure": "weight"},
            "no candidate needs calibration data",
        ),
    ],
)
def test_data_that_is_missing_or_that_nothing_needs(arguments, text):
    model = nn.Sequential(nn.Linear(256, 16))
    with pytest.raises(ConfigError, match=text):
        ao_quant.plan(model, bits=8, **{"measure": "weight", **arguments})
