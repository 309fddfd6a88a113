"""What `prepare`, `calibrate` and `convert` refuse, and that the model is as it was then."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import ao_core
import ao_quant
from ao_core import FqnToConfig, QTensor, quantize_
from ao_core.ext import ConfigError, QuantizationError
from ao_quant import (
    Int8StaticActivationInt8WeightConfig,
    calibrate,
    convert,
    discard,
    prepare,
)

#: these models and data have outliers, or few rows; what becomes of such is in test_outliers.py
pytestmark = pytest.mark.filterwarnings("ignore:the inputs of")

INT8 = Int8StaticActivationInt8WeightConfig()
OBSERVERS = ("minmax", "percentile", "mse")


def _mlp():
    return nn.Sequential(nn.Linear(70, 96), nn.GELU(), nn.Linear(96, 33))


@pytest.mark.parametrize("name", ["int8_static_activation_int8_weight", FqnToConfig({"0": INT8})])
def test_quantizing_without_calibration_says_what_to_do(name, tmp_path):
    model = _mlp()
    with pytest.raises(ConfigError, match=r"act_scale=None .*ao_quant.prepare\(model, config\)"):
        quantize_(model, name)
    assert not isinstance(model[0].weight, QTensor)
    ao_core.save_model(model, tmp_path / "dense")
    for function in (ao_quant.quantize_checkpoint, ao_quant.plan_checkpoint):
        target = [tmp_path / "new"] if function is ao_quant.quantize_checkpoint else []
        with pytest.raises(ConfigError, match="act_scale=None .*the report that either returns"):
            function(tmp_path / "dense", *target, name)
    assert not (tmp_path / "new").exists()


def test_steps_in_a_wrong_order():
    model, x = _mlp(), torch.randn(5, 70)
    for step in (convert, discard, lambda m: calibrate(m).__enter__()):
        with pytest.raises(ConfigError, match="Sequential is not prepared.*prepare"):
            step(model)
    prepare(model, INT8)
    with pytest.raises(ConfigError, match="the model is prepared already: calibrate and convert"):
        prepare(model, INT8)
    with pytest.raises(ConfigError, match="0 is prepared already"):
        prepare(nn.Sequential(model), INT8)
    with calibrate(model):
        model(x)
        for step in (convert, discard, lambda m: calibrate(m).__enter__()):
            with pytest.raises(ConfigError, match="leave it first"):
                step(model)
    with pytest.raises(ConfigError, match="unseen='skip': use one of 'error', 'keep'"):
        convert(model, unseen="skip")
    convert(model)
    with pytest.raises(ConfigError, match="convert: .* was converted already"):
        convert(model)
    with pytest.raises(ConfigError, match="nothing to calibrate.*in low precision already"):
        prepare(model, INT8)


def test_discard_forgets():
    model = _mlp()
    prepare(model, INT8)
    discard(model)
    prepare(model, INT8)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "config",
    [
        "int8_weight_only",
        Int8StaticActivationInt8WeightConfig(act_scale=0.1),
        FqnToConfig({"0": None, "*": "int4_weight_only"}),
        FqnToConfig({"1": INT8, "0": None, "2": None}),
    ],
    ids=["weight only", "calibrated", "rules", "nothing matches"],
)
def test_nothing_to_calibrate(config):
    model = _mlp()
    with pytest.raises(ConfigError, match="nothing to calibrate|matches no parameter"):
        prepare(model, config)
    assert "_ao_calibration" not in vars(model)


def test_a_layer_without_data():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(24, 10), nn.Linear(24, 10)

        def forward(self, x):
            return self.used(x)

    model, x = Branches(), torch.randn(5, 24)
    prepare(model, INT8)
    with calibrate(model):
        model(x)
        model.spare(x[:0])  # an empty batch is no data
    with pytest.raises(QuantizationError, match=r"^spare\.weight saw no data.*unseen='keep'"):
        convert(model)
    assert not isinstance(model.used.weight, QTensor)
    report = convert(model, unseen="keep")
    (kept,) = [r for r in report if r.fqn == "spare.weight"]
    assert (kept.status, kept.reason) == ("unchanged", "it saw no data in calibration")
    assert isinstance(model.used.weight, QTensor)
    assert not isinstance(model.spare.weight, QTensor)


def test_nothing_at_all_was_seen():
    model = _mlp()
    prepare(model, INT8)
    report = convert(model, unseen="keep")
    assert {r.status for r in report} == {"unchanged"}
    quantize_(model, ao_core.resolve_config(report.config))
    assert not isinstance(model[0].weight, QTensor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_activations_that_are_not_finite(observer, bad):
    model, x = _mlp(), torch.randn(5, 70)
    prepare(model, Int8StaticActivationInt8WeightConfig(observer=observer))
    hook = model[1].register_forward_hook(lambda m, i, out: out.where(out < out.max(), bad))
    with (
        calibrate(model),
        pytest.raises(QuantizationError, match=r"activations of 2\.weight .* 1 of 480"),
    ):
        model(x)
    hook.remove()
    assert model._ao_calibration.unseen == ["2.weight"]
    with calibrate(model):
        model(x)
    convert(model)


def test_bad_weights_leave_the_model_as_it_was():
    model, x = _mlp(), torch.randn(5, 70)
    prepare(model, INT8)
    with calibrate(model):
        model(x)
    with torch.no_grad():
        model[2].weight[3, 5] = torch.nan
    with pytest.raises(QuantizationError, match=r"2\.weight has 1 NaN"):
        convert(model)
    assert not isinstance(model[0].weight, QTensor)
    with pytest.raises(QuantizationError, match=r"2\.weight has 1 NaN"):
        prepare(copy.deepcopy(nn.Sequential(*model)), INT8)
    with torch.no_grad():
        model[2].weight[3, 5] = 0
    convert(model)
    with pytest.raises(QuantizationError, match="0.weight is on the meta device"):
        prepare(_mlp().to("meta"), INT8)


def test_strict_reports_what_cannot_be_done():
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(64, 5))
    prepare(model, FqnToConfig({"0": "nvfp4_static_activation_nvfp4_weight", "*": INT8}))
    with calibrate(model):
        model(torch.randn(2, 4, 10))
    with pytest.raises(QuantizationError, match=r"0\.weight: it holds the filters"):
        convert(model, strict=True)
    assert not isinstance(model[2].weight, QTensor)
    convert(model)
    assert isinstance(model[2].weight, QTensor)
