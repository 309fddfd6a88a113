"""What static scales cost beside dynamic ones, and what the observers make of outliers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import quantize_
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    calibrate,
    convert,
    prepare,
)

#: these models and data have outliers, or few rows; what becomes of such is in test_outliers.py
pytestmark = pytest.mark.filterwarnings("ignore:the inputs of")


@pytest.fixture(scope="module")
def trained():
    """A model that has learned the argument of two waves from their sum, and noisy sums to try."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(70, 128), nn.GELU(), nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(150):
            x, y = _waves(64)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert float(loss.detach()) < 0.05
        return model.eval().requires_grad_(False), [_waves(64)[0] for _ in range(8)], _waves(512)[0]


def _waves(size):
    phase = torch.rand(size, 2) * 2 - 1
    t = torch.linspace(0, 1, 70)
    sums = torch.sin(6 * t + 3 * phase[:, :1]) + torch.sin(15 * t + 3 * phase[:, 1:])
    return sums + 0.1 * torch.randn(size, 70), phase


def _static(model, config, batches):
    model = copy.deepcopy(model)
    prepare(model, config)
    with torch.no_grad(), calibrate(model):
        for batch in batches:
            model(batch)
    convert(model)
    return model


@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse"])
@pytest.mark.parametrize(
    ("make", "dynamic", "floor", "behind"),
    [
        (Int8StaticActivationInt8WeightConfig, "int8_dynamic_activation_int8_weight", 35, 4.5),
        (
            lambda **k: Int8StaticActivationInt8WeightConfig(symmetric_activations=False, **k),
            "int8_dynamic_activation_int8_weight/asymmetric",
            41,
            3,
        ),
        (
            Float8StaticActivationFloat8WeightConfig,
            "float8_dynamic_activation_float8_weight",
            30,
            1.5,
        ),
    ],
    ids=["int8", "asymmetric", "float8"],
)
def test_near_dynamic_scales_on_data_of_the_same_kind(
    trained, sqnr_db, make, dynamic, floor, behind, observer
):
    model, batches, x = trained
    other = copy.deepcopy(model)
    quantize_(other, dynamic)
    exact = model(x)
    best = sqnr_db(exact, other(x))
    found = sqnr_db(exact, _static(model, make(observer=observer), batches)(x))
    assert floor < found < floor + 10
    assert best - behind < found < best + 0.5


def _layer_and_data():
    layer = nn.Linear(256, 70).requires_grad_(False)
    batches = [torch.randn(512, 256) for _ in range(8)]
    batches[3][7, 11] = 40.0  # one value of a million
    return layer, batches, torch.randn(300, 256)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("observer", ["percentile", "mse"])
def test_observers_that_clip_are_better_with_outliers(sqnr_db, observer, symmetric):
    layer, batches, x = _layer_and_data()

    def make(observer):
        config = Int8StaticActivationInt8WeightConfig(
            observer=observer, symmetric_activations=symmetric, on_outliers="keep"
        )
        return sqnr_db(layer(x), _static(layer, config, batches)(x))

    minmax, found = make("minmax"), make(observer)
    assert 18 < minmax < 28
    assert minmax + 6 < found < 43


def test_float8_hardly_minds_outliers(sqnr_db):
    layer, batches, x = _layer_and_data()
    found = {
        observer: sqnr_db(
            layer(x),
            _static(layer, Float8StaticActivationFloat8WeightConfig(observer=observer), batches)(x),
        )
        for observer in ("minmax", "percentile", "mse")
    }
    assert all(27 < value < 33 for value in found.values())
    assert max(found.values()) - min(found.values()) < 1
