"""Corrections against their own mathematics: mean errors of 0, and the tail of a spectrum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ao_core import FqnToConfig, config_from_json, config_to_json, load_model, quantize_, save_model
from ao_core.ext import ConfigError
from ao_core.ext.calibration import best_of_rank, output_error
from ao_quant import (
    AutoRoundConfig,
    BiasCorrectionConfig,
    GPTQConfig,
    ImatrixConfig,
    Int4WeightOnlyConfig,
    SmoothQuantConfig,
    UIntxWeightOnlyConfig,
    low_rank_corrections,
)

FEW = UIntxWeightOnlyConfig(2, 32)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16), nn.Linear(16, 8, bias=False)
    ).eval()


def batches():
    torch.manual_seed(1)
    return [torch.randn(50, 32) + torch.linspace(-1, 2, 32) for _ in range(4)]


@pytest.mark.parametrize("base", [FEW, GPTQConfig(FEW), ImatrixConfig(FEW)], ids=str)
@torch.no_grad()
def test_the_mean_error_of_a_layer_is_zero(base, tmp_path):
    """On the inputs that the corrected layers before it make; weights are those of the base."""
    dense, made, data = model(), model(), batches()
    report = quantize_(made, BiasCorrectionConfig(base), data=data)
    x = torch.cat(data)
    for place in (0, 2):
        error = made[place](x) - dense[place](x)
        assert float(error.std()) > 0.02
        assert float(error.mean(0).abs().max()) < 3e-6
        x = torch.relu(made[place](x))
    records = {record.fqn: record for record in report}
    assert records["0.bias"].status == records["2.bias"].status == "changed"
    assert "mean error of the outputs of 2.weight" in records["2.bias"].reason
    assert "it has no bias to correct" in records["3.weight"].note
    assert made[3].bias is None
    plain = model()
    quantize_(plain, base, data=None if base is FEW else data)
    assert torch.equal(made[0].weight.dequantize(), plain[0].weight.dequantize())
    save_model(made, tmp_path)
    loaded = model()
    load_model(loaded, tmp_path)
    assert torch.equal(loaded(data[0]), made(data[0]))


@torch.no_grad()
def test_filters_in_groups():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2)).eval()
    made, data = copy.deepcopy(dense), [torch.rand(2, 4, 8, 8) for _ in range(3)]
    quantize_(made, BiasCorrectionConfig(FEW), data=data)
    error = torch.cat([made(x) - dense(x) for x in data])
    assert float(error.abs().mean()) > 0.01
    assert float(error.mean((0, 2, 3)).abs().max()) < 1e-5


def test_where_there_is_nothing_to_correct_it_says_so():
    shared, data = model(), batches()
    shared.add_module("4", nn.Linear(8, 48))
    shared[4].bias = shared[0].bias
    report = quantize_(shared, BiasCorrectionConfig(FEW), data=data)
    note = next(r.note for r in report if r.fqn == "0.weight")
    assert "shared by several modules" in note
    with pytest.raises(ConfigError, match="needs one that solves weight by weight"):
        quantize_(model(), BiasCorrectionConfig(AutoRoundConfig(FEW)), data=data)
    for base in (FqnToConfig({"*": FEW}), SmoothQuantConfig()):
        with pytest.raises(ConfigError, match="needs a format of weights or an algorithm"):
            BiasCorrectionConfig(base)
    config = BiasCorrectionConfig(GPTQConfig(FEW))
    assert config_from_json(config_to_json(config)) == config


def test_an_error_leaves_biases_as_they_were():
    made, data = model(), batches()
    with torch.no_grad():
        made[2].weight[1, 1] = torch.nan
    kept = {name: p.detach().clone() for name, p in made.named_parameters()}
    with pytest.raises(Exception, match=r"2\.weight"):
        quantize_(made, BiasCorrectionConfig(FEW), data=data)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.detach(), kept[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_what_remains_is_the_tail_of_the_spectrum(shape):
    torch.manual_seed(3)
    error = torch.randn(shape, dtype=torch.float64)
    x = torch.randn(100, shape[1], dtype=torch.float64) @ torch.randn(shape[1], shape[1]).double()
    hessian = x.t() @ x
    spectrum = torch.linalg.svdvals(error @ torch.linalg.cholesky(hessian))
    for rank in (1, 4, 11):
        b, a = best_of_rank(error, rank, hessian)
        assert (b.shape, a.shape) == ((shape[0], rank), (rank, shape[1]))
        left = output_error(error - b.double() @ a.double(), hessian)
        assert left == pytest.approx(float(spectrum[rank:].square().sum()), rel=1e-5)
    b, a = best_of_rank(error, min(shape), hessian)
    torch.testing.assert_close(b.double() @ a.double(), error, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_corrections_of_a_model():
    dense, made, data = model(), model(), batches()
    quantize_(made, GPTQConfig(FEW), data=data)
    before = dict(made.named_parameters())
    small = low_rank_corrections(made, dense, data, rank=4)
    assert list(small) == ["0.weight", "2.weight", "3.weight"]
    assert all(parameter is before[name] for name, parameter in made.named_parameters())
    assert all(0 < each.error_after < 0.8 * each.error_before for each in small.values())
    assert all(each.rows == 200 for each in small.values())
    whole = low_rank_corrections(made, dict(dense.named_parameters()), data, rank=48)
    x, outputs = torch.cat(data), []
    for found in ({}, small, whole):
        corrected = model()
        for name, parameter in made.named_parameters():
            values = parameter.dequantize() if name.endswith("weight") else parameter.detach()
            if name in found:
                values = values + found[name].b @ found[name].a
            corrected.get_parameter(name).copy_(values)
        outputs.append(float((corrected(x) - dense(x)).square().mean()))
    assert outputs[2] < 1e-8 < outputs[1] < 0.6 * outputs[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rank": 0}, "rank=0: must be positive"),
        ({"originals": {}}, r"originals has no '0\.weight'"),
        (
            {"originals": {"0.weight": torch.zeros(3, 3)}},
            r"shape \(3, 3\), and the model \(48, 32\)",
        ),
        ({"model": nn.Sequential(nn.Linear(3, 3))}, "no linear layer with a quantized weight"),
        ({"data": []}, "data is empty"),
    ],
    ids=["rank", "missing", "shape", "dense", "data"],
)
def test_wrong_arguments(change, text):
    made = model()
    quantize_(made, Int4WeightOnlyConfig(32))
    arguments = {"model": made, "originals": model(), "data": batches(), "rank": 4} | change
    with pytest.raises(ConfigError, match=text):
        low_rank_corrections(**arguments)
