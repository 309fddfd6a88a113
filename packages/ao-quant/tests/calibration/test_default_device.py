"""Calibration within another default device: its statistics stay where they belong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ao_quant
from ao_core import QTensor

#: these models and data have outliers, or few rows; what becomes of such is in test_outliers.py
pytestmark = pytest.mark.filterwarnings("ignore:the inputs of")


@pytest.mark.parametrize("observer", ["minmax", "mse", "percentile"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration_under_a_default_device(observer: str, symmetric: bool) -> None:
    scales = []
    for device in ("cpu", "meta"):
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32, bias=False))
        model[0].weight.data = torch.randn(32, 64, generator=generator)
        x = torch.randn(8, 64, generator=generator)
        config = ao_quant.Int8StaticActivationInt8WeightConfig(
            observer=observer, symmetric_activations=symmetric, on_outliers="keep"
        )
        with torch.device(device):
            ao_quant.prepare(model, config)
            with ao_quant.calibrate(model):
                model(x)
                model(3 * x)
            ao_quant.convert(model)
        weight = model[0].weight
        assert isinstance(weight, QTensor)
        scales.append(float(weight.act_scale))
        assert not model(x).is_meta
    assert scales[0] == scales[1]
