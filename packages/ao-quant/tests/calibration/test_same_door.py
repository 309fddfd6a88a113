"""`quantize_(model, config, data=batches)` is prepare, calibrate and convert, bit for bit."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from ao_core import FqnToConfig, QTensor, quantize_
from ao_core.ext import ConfigError, QuantizationError
from ao_core.ext.calibration import Statistics
from ao_core.testing.base import same_bits
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    NVFP4StaticActivationNVFP4WeightConfig,
    OutlierWarning,
    calibrate,
    convert,
    prepare,
)
from ao_quant.calibration.algorithms import observed
from ao_quant.calibration.observers import OBSERVERS, observe

INT8 = Int8StaticActivationInt8WeightConfig()
CONFIGS = {
    "int8": INT8,
    "asymmetric": Int8StaticActivationInt8WeightConfig(symmetric_activations=False),
    "mse": Int8StaticActivationInt8WeightConfig(observer="mse"),
    "percentile": Float8StaticActivationFloat8WeightConfig(observer="percentile"),
    "nvfp4": NVFP4StaticActivationNVFP4WeightConfig(),
    "mixed": FqnToConfig({"0": "int4_weight_only", "3": None, "*": INT8}),
    "given": FqnToConfig({"0": replace(INT8, act_scale=0.5), "*": INT8}),
}


def _model(dtype):
    layers = nn.Linear(70, 96), nn.GELU(), nn.Linear(96, 33), nn.Linear(33, 5)
    return nn.Sequential(*layers, nn.Unflatten(-1, (1, 5)), nn.Conv1d(1, 2, 3)).to(dtype)


def _steps(model, config, batches):
    prepare(model, config)
    with torch.no_grad(), calibrate(model):
        for batch in batches:
            model(batch)
    return convert(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore:the inputs of")
def test_one_call_is_the_three_steps(name, dtype):
    model, batches = _model(dtype).eval(), [torch.randn(n, 70).to(dtype) for n in (9, 1, 4)]
    other = copy.deepcopy(model)
    report = quantize_(model, CONFIGS[name], data=batches)
    expected = _steps(other, CONFIGS[name], batches)
    assert dict(model.named_parameters()).keys() == dict(other.named_parameters()).keys()
    for (fqn, new), old in zip(model.named_parameters(), other.parameters(), strict=True):
        assert isinstance(new, QTensor) == isinstance(old, QTensor), fqn
        if isinstance(new, QTensor):
            assert new.spec == old.spec
            assert same_bits(new.dequantize(), old.dequantize())
            parts = zip(new.leaves(), old.leaves(), strict=True)
            assert all(same_bits(a, b) for (_, a), (_, b) in parts)
    assert report.config == expected.config
    for mine, its in zip(report.records, expected.records, strict=True):
        assert replace(mine, seconds=its.seconds, rows=None) == its
    seen = {r.rows for r in report.records if r.status == "changed"}
    assert 14 in seen
    assert seen <= {14, 42, None}  # the convolution sees three positions of each


def test_outliers_get_a_scale_for_each_token():
    model, batches = _model(torch.float32).eval(), [torch.randn(9, 70) for _ in range(2)]
    batches[1][3, 5] = 3000.0
    other = copy.deepcopy(model)
    caught = []
    for call in (
        lambda: quantize_(model, INT8, data=batches),
        lambda: _steps(other, INT8, batches),
    ):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            report = call()
        caught.append([str(each.message) for each in seen if each.category is OutlierWarning])
        assert "outliers" in report.records[0].reason
    assert caught[0] == caught[1]
    assert len(caught[0]) == 1
    assert model[0].weight.spec == other[0].weight.spec
    assert not model[0].weight.spec.act.is_static


def test_what_is_observed_merges():
    parts = [torch.randn(n, 6) * scale for n, scale in ((5, 1.0), (3, 40.0), (9, 1e-4))]
    for observer in OBSERVERS:
        need = (observed(observer),)
        state = OBSERVERS[observer].start()
        for part in parts:
            state = observe(state, part)
        whole, alone = Statistics(need), []
        for part in parts:
            whole = whole.add(part)
            alone.append(Statistics(need).add(part))
        merged = alone[0].merge(alone[1].merge(alone[2]))
        restored = Statistics.restored(need, merged.state_dict())
        for found in (whole, merged, restored):
            assert found["act_range"].tolist() == list(state.range)
            assert int(found["act_count"]) == state.count
            if state.histogram is not None:
                assert torch.equal(found["act_counts"], state.histogram.counts)
                assert int(found["act_top"]) == state.histogram.top


def test_refusals():
    model, batches = _model(torch.float32), [torch.randn(3, 70)]
    with pytest.raises(ConfigError, match=r"quantize_\(model, config, data=batches\)"):
        quantize_(model, INT8)
    with pytest.raises(ConfigError, match="needs no calibration data"):
        quantize_(model, "int4_weight_only", data=batches)
    with pytest.raises(QuantizationError, match="NaN or inf"):
        quantize_(model, INT8, data=[torch.full((2, 70), torch.inf)])
    assert not any(isinstance(p, QTensor) for p in model.parameters())
    unreached = nn.ModuleDict({"a": nn.Linear(70, 4), "b": nn.Linear(4, 4)})
    unreached.forward = lambda x: unreached["a"](x)
    report = quantize_(unreached, replace(INT8, max_error_ratio=100.0), data=batches)
    (skipped,) = report.with_status("skipped")
    assert (skipped.fqn, skipped.reason) == ("b.weight", "the calibration data never reached it")
