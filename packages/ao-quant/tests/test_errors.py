"""Bad input gives one clear error that says what would work, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import FqnToConfig, config_from_dict, quantize_
from ao_core.ext import ConfigError, QuantizationError, UnknownNameError
from ao_quant import Int4WeightOnlyConfig


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(40, 33), nn.GELU(), nn.Linear(33, 8))


@pytest.fixture
def unchanged(model):
    """A function that asserts that no parameter was replaced, nor any bit of it changed."""
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}

    def check():
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        for name, (parameter, values) in before.items():
            assert after[name] is parameter
            if not parameter.is_meta:
                raw = parameter.detach().contiguous().view(torch.uint8)
                assert torch.equal(raw, values.contiguous().view(torch.uint8))

    return check


def test_an_unknown_recipe_suggests_the_nearest(model, unchanged):
    with pytest.raises(UnknownNameError, match="Did you mean 'int4_weight_only'"):
        quantize_(model, "int4_weight_onyl")
    unchanged()


def test_a_class_instead_of_a_configuration(model, unchanged):
    with pytest.raises(
        ConfigError, match=r"config=.* \(a class: call it to make one\) .* takes a Config, a string"
    ):
        quantize_(model, Int4WeightOnlyConfig)
    unchanged()


def test_a_wrong_group_size(model, unchanged):
    data = {"name": "int4_weight_only", "args": {"group_size": 48}}
    with pytest.raises(ConfigError, match=r"group_size=48 .* 32, 64, 128, 256, 'row'"):
        quantize_(model, config_from_dict(data))
    unchanged()


def test_an_unknown_argument():
    with pytest.raises(ConfigError, match=r"no argument \['groupsize'\]; known: .*'group_size'"):
        config_from_dict({"name": "int4_weight_only", "args": {"groupsize": 64}})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(model, bad, default, request):
    # in the last layer, so that the first would be quantized already by one that looks late
    with torch.no_grad():
        model[2].weight[1, 2] = bad
    unchanged = request.getfixturevalue("unchanged")
    with pytest.raises(QuantizationError, match=r"2\.weight has 1 NaN or inf"):
        quantize_(model, default)
    unchanged()


def test_weights_that_are_not_floating_point(model, default, request):
    model[2].weight = nn.Parameter(torch.ones(8, 33, dtype=torch.int32), requires_grad=False)
    unchanged = request.getfixturevalue("unchanged")
    with pytest.raises(QuantizationError, match=r"2\.weight has dtype torch\.int32"):
        quantize_(model, default)
    unchanged()


def test_weights_without_values(default, request):
    model = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 8, device="meta"))
    with pytest.raises(QuantizationError, match=r"1\.weight is on the meta device.*load"):
        quantize_(model, default)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize("key", ["re:.*attention.*", "3.weight", "encoder"])
def test_a_name_that_matches_nothing(model, unchanged, key):
    with pytest.raises(ConfigError, match="matches no parameter or module; the model has 0.weight"):
        quantize_(model, FqnToConfig({key: "int8_weight_only", "*": "int4_weight_only"}))
    unchanged()


def test_an_invalid_regular_expression(model, unchanged):
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        quantize_(model, FqnToConfig({"re:(": "int8_weight_only"}))
    unchanged()


def test_strict_refuses_what_would_be_skipped(dynamic):
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 4, 3))
    before = list(model.parameters())
    with pytest.raises(QuantizationError, match=r"1\.weight: it holds the filters.*weight_only"):
        quantize_(model, dynamic, strict=True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
