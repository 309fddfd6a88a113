"""Algorithms as users call them: errors, notes, layers that are left out, files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import FqnToConfig, config_from_json, config_to_json, load_model, quantize_, save_model
from ao_core.ext import ConfigError
from ao_quant import (
    AWQConfig,
    BitNetWeightOnlyConfig,
    GGUFWeightOnlyConfig,
    GPTQConfig,
    ImatrixConfig,
    Int4WeightOnlyConfig,
)


def model():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()


def batches(rows=64, count=4):
    """Correlated inputs, of which one channel is large."""
    mix = torch.eye(64) + torch.randn(64, 64) / 6
    mix[:, 5] *= 30
    return [torch.randn(rows, 64) @ mix for _ in range(count)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"base": FqnToConfig({"*": "int4_weight_only"})}, "base=.*FqnToConfig around GPTQConfig"),
        ({"base": GPTQConfig()}, "base=.*needs a format of weights"),
        ({"base": "int4_weigth_only"}, "Did you mean 'int4_weight_only'"),
        ({"damping": 0.0}, "damping=0.0.*0.01"),
        ({"order": "random"}, "order='random'.*'activations', 'groups', 'natural'"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ConfigError, match=text):
        GPTQConfig(**arguments)


def test_a_name_of_a_recipe_is_a_base():
    config = GPTQConfig("int4_weight_only")
    assert config.base == Int4WeightOnlyConfig()
    assert config_from_json(config_to_json(config)) == config


def test_no_data_is_an_error():
    with pytest.raises(ConfigError, match="data=batches"):
        quantize_(model(), GPTQConfig())


def test_few_rows_are_noted_and_damped():
    report = quantize_(model(), GPTQConfig(Int4WeightOnlyConfig(32)), data=batches(16, 1))
    (first, *_) = report.with_status("changed")
    assert "saw 16 rows for 64 columns" in first.note
    assert first.damping is not None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ImatrixConfig(BitNetWeightOnlyConfig()), "no scales that could be searched for"),
        (ImatrixConfig(GGUFWeightOnlyConfig("q8_0")), "scales of q8_0 follow the greatest element"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:nothing was converted")
def test_formats_that_an_algorithm_has_nothing_for_say_so(config, reason):
    wide = nn.Sequential(nn.Linear(256, 256)).eval()
    report = quantize_(wide, config, data=[torch.randn(300, 256)])
    assert reason in next(r.reason for r in report.records if r.fqn == "0.weight")


@pytest.mark.parametrize("config", [GPTQConfig, ImatrixConfig, AWQConfig])
def test_outputs_are_nearer_and_files_keep_them(config, tmp_path):
    dense, data = model(), batches()
    made, nearest = model(), model()
    for each in (made, nearest):
        each.load_state_dict(dense.state_dict())
    quantize_(nearest, Int4WeightOnlyConfig(32))
    quantize_(made, config(Int4WeightOnlyConfig(32)), data=data)
    x = torch.cat(data)
    error, other = ((each(x) - dense(x)).square().mean() for each in (made, nearest))
    assert 0.01 < error / other < 0.98
    save_model(made, tmp_path)
    loaded = model()
    load_model(loaded, tmp_path)
    assert torch.equal(loaded(x), made(x))
    assert torch.equal(torch.compile(made, backend="eager")(x), made(x))


def test_each_group_of_a_convolution_has_its_own_hessian():
    """As two linear layers of its two groups, on their own channels."""
    conv = nn.Conv2d(8, 6, 3, groups=2, bias=False).eval()
    x = torch.randn(12, 8, 9, 9)
    x = torch.cat([x[:, :4] * torch.logspace(0, 1, 4)[:, None, None], x[:, 4:].cumsum(1)], 1)
    dense = conv.weight.detach().clone()
    quantize_(conv, GPTQConfig("int8"), data=[x])
    rows = nn.functional.unfold(x, 3).transpose(1, 2).reshape(-1, 72)
    for group in range(2):
        layer = nn.Sequential(nn.Linear(36, 3, bias=False)).eval()
        layer[0].weight.data = dense[3 * group : 3 * group + 3].reshape(3, 36)
        quantize_(layer, GPTQConfig("int8"), data=[rows[:, 36 * group : 36 * group + 36]])
        values = conv.weight.dequantize()[3 * group : 3 * group + 3].reshape(3, 36)
        torch.testing.assert_close(values, layer[0].weight.dequantize(), rtol=1e-4, atol=1e-5)
