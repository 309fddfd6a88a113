"""The field `scale_method` of the integer configurations, and what it does to the answers of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ao_core
from ao_core.ext import UnknownNameError
from ao_quant import Int4WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from ao_quant.configs import GROUP_SIZES

CONFIGS = (Int8WeightOnlyConfig, Int4WeightOnlyConfig, IntxWeightOnlyConfig)


@pytest.mark.parametrize("config_type", CONFIGS)
def test_configurations_name_a_method(config_type):
    assert (
        config_type().scale_method
        == config_type().weight_format(torch.float32).scale_method
        == "absmax"
    )
    config = config_type(group_size=64, scale_method="hqq")
    assert config.weight_format(torch.float32).scale_method == "hqq"
    assert ao_core.config_from_json(ao_core.config_to_json(config)) == config
    old = ao_core.config_to_dict(config_type())
    del old["args"]["scale_method"]
    assert ao_core.config_from_dict(old) == config_type()
    model = nn.Linear(8, 8)
    with pytest.raises(UnknownNameError, match="way to choose scales 'best'"):
        ao_core.quantize_(model, config_type(scale_method="best"))
    assert type(model.weight) is nn.Parameter


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_answers_of_a_model_move_less(bits, symmetric):
    """KL divergence from the dense model, for every size of groups; weights with tails, as trained ones."""
    torch.manual_seed(bits)
    model = nn.Sequential(nn.Linear(320, 192), nn.GELU(), nn.Linear(192, 64))
    model.requires_grad_(False)
    tails = torch.distributions.StudentT(5.0)
    for layer in (model[0], model[2]):
        scale = layer.in_features**-0.5
        layer.weight = nn.Parameter(tails.sample(layer.weight.shape) * scale, requires_grad=False)
    x = torch.randn(256, 320)
    expected = model(x).log_softmax(-1)

    def divergence(group, scale_method):
        quantized = copy.deepcopy(model)
        ao_core.quantize_(
            quantized, IntxWeightOnlyConfig(bits, group, symmetric, scale_method=scale_method)
        )
        answer = quantized(x).log_softmax(-1)
        return float(nn.functional.kl_div(answer, expected, log_target=True, reduction="batchmean"))

    for group in GROUP_SIZES:
        absmax, mse, hqq = (divergence(group, s) for s in ("absmax", "mse", "hqq"))
        assert mse < absmax, group
        assert hqq < absmax, group
        assert min(mse, hqq) > 0.2 * absmax
