"""Names of algorithms with formats, and orders that make no sense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import quantize_, resolve_config
from ao_core.ext import ConfigError, UnknownNameError, registry
from ao_core.ext.quantizing import stack_of
from ao_quant import (
    AWQConfig,
    GGUFWeightOnlyConfig,
    GPTQConfig,
    ImatrixConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    IntxWeightOnlyConfig,
    LowRankConfig,
    QronosConfig,
    RotateConfig,
    SmoothQuantConfig,
)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq/int4-g128", GPTQConfig(Int4WeightOnlyConfig(128))),
        ("gptq/int3-g64", GPTQConfig(IntxWeightOnlyConfig(3, 64))),
        ("qronos/int3-g64", QronosConfig(IntxWeightOnlyConfig(3, 64))),
        ("awq/int4-g128", AWQConfig(Int4WeightOnlyConfig(128))),
        ("imatrix/q4_k", ImatrixConfig(GGUFWeightOnlyConfig("q4_k"))),
        ("smoothquant/w8a8", SmoothQuantConfig(Int8DynamicActivationInt8WeightConfig())),
        ("gptq/int4_weight_only/g32-asymmetric", GPTQConfig(Int4WeightOnlyConfig(32))),
        ("int4-g128", Int4WeightOnlyConfig(128)),
    ],
)
def test_a_name_is_a_method_and_a_format(name, config):
    assert resolve_config(name) == config


def test_several_methods_are_a_list():
    assert stack_of("rotate+gptq/int4-g128") == [RotateConfig(), GPTQConfig("int4-g128")]
    assert stack_of("awq+gptq/int4-g128") == [AWQConfig(), GPTQConfig("int4-g128")]
    assert stack_of("rotate+low_rank+qronos/w4a4") == [
        RotateConfig(), LowRankConfig(), QronosConfig("w4a4"),
    ]  # fmt: skip
    assert stack_of("rotate/int4-g128") == [RotateConfig(), Int4WeightOnlyConfig(128)]
    assert stack_of("int4_weight_only/g32-asymmetric") is None


def test_short_names_are_those_of_one_recipe_each():
    shorts = [recipe.short for recipe in registry.recipes.values() if recipe.short]
    assert len(set(shorts)) == len(shorts) > 15
    assert not set(shorts) & {*registry.recipes.names(), *registry.algorithms.names()}


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("gptqq/int4-g128", UnknownNameError, "Did you mean 'gptq/int4-g128'"),
        ("gptq/int4-g129", UnknownNameError, "'int4-g129'. Did you mean 'int4-g128'"),
        ("int4_weight_only/g31", UnknownNameError, "'int4_weight_only/g31'"),
        ("awq+gptq/int4-g128", ConfigError, "list of 2 configurations"),
        ("gptq/imatrix", ConfigError, "base=.*needs a format of weights"),
    ],
)
def test_other_names_say_what_is_wrong(name, error, text):
    with pytest.raises(error, match=text):
        resolve_config(name)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("gptq+imatrix/int4-g128", r"GPTQConfig.*ImatrixConfig\]: both round the same weights"),
        ("gptq+rotate/int4-g128", "RotateConfig.*quantized by then; put it before GPTQConfig"),
        (["int4-g128", "gptq"], r"Int4WeightOnlyConfig.*GPTQConfig\]: both round"),
    ],
)
def test_orders_that_make_no_sense_leave_the_model_alone(config, text):
    model = nn.Sequential(nn.Linear(128, 16)).eval()
    with pytest.raises(ConfigError, match=text):
        quantize_(model, config, data=[torch.randn(8, 128)])
    assert type(model[0].weight) is nn.Parameter


def test_a_name_quantizes_with_data():
    model = nn.Sequential(nn.Linear(128, 16)).eval()
    report = quantize_(model, "gptq/int4-g128", data=[torch.randn(300, 128)])
    assert 0.2 < report.records[0].error_vs_rtn < 1
    two = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 16)).eval()
    report = quantize_(two, "awq+gptq/int4-g128", data=[torch.randn(300, 128)])
    assert {record.status for record in report.records[::2]} == {"changed"}
