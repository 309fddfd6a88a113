"""Outliers: weights whose static products are much worse are named, and get what is asked for."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from ao_core import QTensor, Target, config_from_dict, quantize_
from ao_core.ext import ConfigError
from ao_core.ext.calibration import Statistics
from ao_core.ext.numerics import sqnr
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    NVFP4StaticActivationNVFP4WeightConfig,
    OutlierWarning,
    SmoothQuantConfig,
    calibrate,
    convert,
    prepare,
)
from ao_quant.calibration.judging import product_errors
from ao_quant.calibration.rows import ROWS

CONFIGS = {
    "minmax": Int8StaticActivationInt8WeightConfig(),
    "percentile": Int8StaticActivationInt8WeightConfig(observer="percentile"),
    "mse": Int8StaticActivationInt8WeightConfig(observer="mse"),
    "asymmetric": Int8StaticActivationInt8WeightConfig(False, max_error_ratio=3.0),
}
FLOATS = {
    "float8": Float8StaticActivationFloat8WeightConfig(),
    "nvfp4": NVFP4StaticActivationNVFP4WeightConfig(),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )


def _data(spike: float) -> torch.Tensor:
    """Rows of like sizes, but for one huge value, as the first token of a text has in many models."""
    x = torch.rand(256, 64, generator=torch.Generator().manual_seed(1)) * 6 - 3
    x[0, 3] = spike
    return x


def _converted(config, spike):
    model = _model()
    prepare(model, config)
    with torch.no_grad(), calibrate(model):
        model(_data(spike))
    return model, convert(model)


def _quantized(config, spike):
    model = _model()
    return model, quantize_(model, config, data=[_data(spike)])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_weights_with_outliers_get_dynamic_scales(config):
    with pytest.warns(OutlierWarning, match=r"the inputs of 0\.weight have outliers"):
        model, report = _converted(config, 3000.0)
    first, other = (report.records[i] for i in (0, 2))
    assert "(on_outliers='dynamic')" in first.reason
    assert f"0.weight: {first.reason}" in str(report)
    assert (model[0].weight.spec.act.static, other.reason) == (False, "")
    assert model[2].weight.spec.act.static
    entry = dict(config_from_dict(report.config).entries)["0.weight"]
    assert entry == Int8DynamicActivationInt8WeightConfig(config.symmetric_activations)
    again = _model()
    quantize_(again, config_from_dict(report.config))
    assert torch.equal(again(_data(1.0)), model(_data(1.0)))


@pytest.mark.parametrize("by_data", [False, True], ids=["three steps", "one call"])
@pytest.mark.parametrize("policy", ["dense", "keep"])
def test_other_policies(policy, by_data):
    config = replace(CONFIGS["minmax"], on_outliers=policy)
    with pytest.warns(OutlierWarning, match=f"on_outliers='{policy}'"):
        model, report = (_quantized if by_data else _converted)(config, 3000.0)
    first = report.records[0]
    assert "error of the product" in first.reason
    if policy == "dense":
        assert first.status == "unchanged"
        assert not isinstance(model[0].weight, QTensor)
    else:
        assert model[0].weight.spec.act.static
    assert model[2].weight.spec.act.static


def test_the_ratio_says_what_counts():
    """One scale has a larger error where some rows are three times as large as others."""
    x = _data(1.0)
    x[:64] *= 3
    layer = nn.Linear(64, 64)
    found = {}
    for ratio in (1.0, 1.5, 3.0, 5.0, 50.0):
        model = nn.Sequential(copy.deepcopy(layer))
        with warnings.catch_warnings(action="ignore"):
            quantize_(model, Int8StaticActivationInt8WeightConfig(max_error_ratio=ratio), data=[x])
        found[ratio] = model[0].weight.spec.act.static
    assert list(found.values()) == sorted(found.values())
    assert found[50.0]
    assert not found[1.0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_one_scale_costs_there(config):
    """All the other rows: nothing is left of them, or of the row that the others are spared."""
    dense, found = _model(), {}
    for policy in ("dynamic", "keep", "dense"):
        with pytest.warns(OutlierWarning):
            model, _ = _converted(replace(config, on_outliers=policy), 3000.0)
        rows = [sqnr(d, m) for d, m in zip(dense(_data(3000.0)), model(_data(3000.0)), strict=True)]
        found[policy] = float(min(rows))
    assert found["keep"] < 5
    assert min(found["dynamic"], found["dense"]) > 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rows_that_are_kept_do_not_depend_on_when_they_were_seen(dtype):
    torch.manual_seed(0)
    rows = torch.randn(300, 100).to(dtype)
    repeated = torch.cat(
        [rows, rows[:200], -torch.zeros(50, 100, dtype=dtype), rows[:1].expand(80, -1)]
    )
    batches = [rows[200:], torch.zeros(1, 100, dtype=dtype), rows[:250]]
    found = []
    for order in ([repeated], batches, batches[::-1]):
        statistics = Statistics(ROWS)
        for batch in order:
            statistics = statistics.absorb(batch)
        found.append(statistics.values)
    for other in found[1:]:
        for key, value in found[0].items():
            assert torch.equal(other[key], value)
    assert len(found[0]["sample"].float().unique(dim=0)) == 64
    reach = rows.abs().amax(-1).float().sort(descending=True).values
    assert torch.equal(found[0]["greatest"].abs().amax(-1).float(), reach[:16])
    # a sample of random rows, not the first ones
    places = (rows[:, None] == found[0]["sample"]).all(-1).nonzero()[:, 0]
    assert 100 < places.double().mean() < 200


@pytest.mark.parametrize(
    ("config", "spike"),
    [(config, 1.0) for config in CONFIGS.values()]
    + [(config, 3000.0) for config in FLOATS.values()],
    ids=[*CONFIGS, *FLOATS],
)
def test_rows_of_like_sizes_and_floats_have_none(config, spike):
    model, _ = _converted(config, spike)  # warnings are errors here
    assert all(model[i].weight.spec.act.static or config == FLOATS["nvfp4"] for i in (0, 2, 4))


def test_small_rows_that_floats_lose():
    """Below the least float8 number, one scale leaves nothing: the rule needs no list of formats."""
    model, x = _model(), _data(1.0)
    x[:128] *= 1e-6
    with pytest.warns(OutlierWarning):
        report = quantize_(model, FLOATS["float8"], data=[x])
    assert "error of the product" in report.records[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_against_float64(dtype):
    layer = nn.Linear(64, 48, bias=False).to(dtype)
    x = _data(40.0).to(dtype)
    scale = float(x.abs().max()) / 127
    config = replace(CONFIGS["minmax"], act_scale=scale)
    target = Target("weight", layer, "weight")
    rows = {"sample": x, "greatest": x[:1]}
    found = product_errors(layer.weight.detach()[None], [rows], config, target)
    w, x = layer.weight.detach().double(), x.double()
    steps = w.abs().amax(1, keepdim=True) / 127
    rounded = (w / steps).round() * steps

    def error(by):
        wrong = ((x / by).round().clamp(-128, 127) * by) @ rounded.t() - x @ w.t()
        return float((wrong.square().sum(-1) / (x @ w.t()).square().sum(-1)).mean())

    assert found.static == pytest.approx(error(scale), rel=0.1)
    assert found.dynamic == pytest.approx(error(x.abs().amax(1, keepdim=True) / 127), rel=0.1)


def test_zeros_are_no_outliers():
    model = _model()
    prepare(model, CONFIGS["minmax"])
    with calibrate(model):
        model(torch.zeros(4, 64))
    convert(model)


def test_refusal():
    with pytest.raises(ConfigError, match="on_outliers='drop'"):
        replace(copy.copy(CONFIGS["minmax"]), on_outliers="drop")


@pytest.mark.filterwarnings("ignore:the inputs of")
def test_smoothquant_takes_them_away_first():
    """A channel of large activations: its factor lets the weight behind the norm stay static."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48)).eval().requires_grad_(False)
    model[0].weight[3] = 300.0
    data, alone = [torch.randn(64, 64) for _ in range(2)], copy.deepcopy(model)
    exact = [model(x) for x in data]
    quantize_(model, [SmoothQuantConfig(), CONFIGS["minmax"]], data=data)
    quantize_(alone, replace(CONFIGS["minmax"], on_outliers="keep"), data=data)
    found, other = (torch.cat([m(x) for x in data]) for m in (model, alone))
    assert sqnr(torch.cat(exact), found) > sqnr(torch.cat(exact), other) + 3
