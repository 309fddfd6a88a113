"""Activations with outliers: layers that have them are named, and get a scale for each token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import config_from_dict, quantize_
from ao_core.ext import ConfigError
from ao_core.ext.numerics import sqnr
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    OutlierWarning,
    calibrate,
    convert,
    prepare,
)

CONFIGS = {
    "minmax": Int8StaticActivationInt8WeightConfig(),
    "percentile": Int8StaticActivationInt8WeightConfig(observer="percentile"),
    "mse": Int8StaticActivationInt8WeightConfig(observer="mse"),
    "asymmetric": Int8StaticActivationInt8WeightConfig(symmetric_activations=False),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))


def _data(spike: float) -> torch.Tensor:
    """Rows of which the first has one huge value, as the first token of a text has in many models."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    x[0, 3] = spike
    return x


def _seen(config, spike):
    model = _model()
    calibration = prepare(model, config)
    with torch.no_grad(), calibrate(model):
        model(_data(spike))
    return model, calibration


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layers_with_outliers_get_dynamic_scales(config):
    model, calibration = _seen(config, 3000.0)
    assert calibration.outliers == ["0.weight"]
    assert "; outliers: mean magnitude 0.9" in str(calibration).splitlines()[0]
    with pytest.warns(OutlierWarning, match=r"the inputs of 0\.weight have outliers"):
        report = convert(model)
    first, other = (report.records[i] for i in (0, 2))
    assert "from -4" in first.reason
    assert "to 3000" in first.reason
    assert f"0.weight: {first.reason}" in str(report)
    assert (model[0].weight.spec.act.static, other.reason) == (False, "")
    assert model[2].weight.spec.act.static
    entry = dict(config_from_dict(report.config).entries)["0.weight"]
    assert entry == Int8DynamicActivationInt8WeightConfig(config.symmetric_activations)
    again = _model()
    quantize_(again, config_from_dict(report.config))
    assert torch.equal(again(_data(1.0)), model(_data(1.0)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_one_scale_costs_there(config):
    """All the other rows: nothing is left of them, or of the row that the others are spared."""
    dense, found = _model(), {}
    for outliers in ("dynamic", "static", "keep"):
        model, _ = _seen(config, 3000.0)
        with pytest.warns(OutlierWarning, match=f"outliers='{outliers}'"):
            convert(model, outliers=outliers)
        rows = [sqnr(d, m) for d, m in zip(dense(_data(3000.0)), model(_data(3000.0)), strict=True)]
        found[outliers] = float(min(rows))
    assert found["static"] < 5
    assert min(found["dynamic"], found["keep"]) > 18


@pytest.mark.parametrize(
    ("config", "spike"),
    [
        *[(config, 60.0) for config in CONFIGS.values()],
        (Float8StaticActivationFloat8WeightConfig(), 3000.0),
    ],
    ids=[*CONFIGS, "float8"],
)
def test_ordinary_activations_and_floats_have_none(config, spike):
    model, calibration = _seen(config, spike)
    assert calibration.outliers == []
    assert "outliers" not in str(calibration)
    convert(model)  # warnings are errors here
    assert all(model[i].weight.spec.act.static for i in (0, 2, 3))


def test_zeros_are_no_outliers():
    model = _model()
    calibration = prepare(model, CONFIGS["minmax"])
    with calibrate(model):
        model(torch.zeros(4, 64))
    assert calibration.outliers == []


def test_refusal():
    model, _ = _seen(CONFIGS["minmax"], 1.0)
    with pytest.raises(
        ConfigError, match="outliers='drop': use one of 'dynamic', 'keep', 'static'"
    ):
        convert(model, outliers="drop")
