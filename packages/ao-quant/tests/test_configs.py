from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, fields

import pytest

import ao_core
import ao_quant
from ao_core.ext import FLOATS, ConfigError
from ao_quant import configs as c
from ao_quant.recipes import RECIPES

STATIC_INT8 = c.Int8StaticActivationInt8WeightConfig
STATIC_FLOAT8 = c.Float8StaticActivationFloat8WeightConfig
ALL = c.CONFIGS | c.CALIBRATED


@pytest.mark.parametrize("name", list(ALL))
def test_the_lowercase_name_is_the_class_and_resolves_to_its_default(name):
    assert getattr(ao_quant, name) is ALL[name]
    assert ao_core.resolve_config(name) == ALL[name]()
    assert issubclass(ALL[name], ao_core.Config)
    assert ALL[name].version == 1


@pytest.mark.parametrize("name", list(ALL))
def test_frozen(name):
    config = ALL[name]()
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, None)
    assert hash(config) == hash(ALL[name]())


@pytest.mark.parametrize("recipe_", RECIPES, ids=lambda r: r.name)
def test_json_and_yaml_round_trip(recipe_):
    config = recipe_.config
    assert ao_core.config_from_json(ao_core.config_to_json(config)) == config
    assert ao_core.config_from_yaml(ao_core.config_to_yaml(config)) == config
    assert ao_core.config_to_dict(config)["provider"] == "ao-quant"


@pytest.mark.parametrize(
    "config",
    [
        c.Int8StaticActivationInt8WeightConfig(observer="mse", act_scale=0.1),
        c.Int8StaticActivationInt8WeightConfig(False, act_scale=2.0**-126, act_zero_point=255),
        c.Float8StaticActivationFloat8WeightConfig("tensor", "e5m2", percentile=99.5),
        c.NVFP4StaticActivationNVFP4WeightConfig(observer="percentile", act_scale=0.01),
    ],
    ids=str,
)
def test_static_scales_round_trip(config):
    assert ao_core.config_from_json(ao_core.config_to_json(config)) == config
    assert ao_core.config_from_yaml(ao_core.config_to_yaml(config)) == config


@pytest.mark.parametrize(
    ("make", "parameter", "value", "hint"),
    [
        (lambda: STATIC_INT8(percentile=50.0), "percentile", "50.0", "up to 100.0"),
        (lambda: STATIC_INT8(percentile=99), "percentile", "99", "use a float"),
        (lambda: STATIC_INT8(max_error_ratio=0.9), "max_error_ratio", "0.9", "from 1.0 on"),
        (lambda: STATIC_INT8(max_error_ratio=float("inf")), "max_error_ratio", "inf", "'keep'"),
        (lambda: STATIC_INT8(percentile=float("nan")), "percentile", "nan", "use a float"),
        (lambda: STATIC_INT8(act_scale=0.0), "act_scale", "0.0", "positive float32"),
        (lambda: STATIC_INT8(act_scale=1), "act_scale", "1", "positive float32"),
        (lambda: STATIC_INT8(act_scale=1e39), "act_scale", "1e+39", "positive float32"),
        (
            lambda: STATIC_INT8(act_zero_point=3),
            "act_zero_point",
            "3",
            "goes with act_scale and symmetric",
        ),
        (
            lambda: STATIC_INT8(False, act_scale=0.1),
            "act_zero_point",
            "None",
            "goes with act_scale",
        ),
        (
            lambda: STATIC_INT8(False, act_scale=0.1, act_zero_point=256),
            "act_zero_point",
            "256",
            "from 0 to 255",
        ),
    ],
)
def test_numbers_of_static_scales_are_checked(make, parameter, value, hint):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(
        f"{parameter}={value} in Int8StaticActivationInt8WeightConfig: "
    )
    assert hint in str(caught.value)


def test_nvfp4_has_no_observer_of_errors():
    with pytest.raises(
        ConfigError, match="observer='mse' in NVFP4Static.*use 'minmax' or 'percent"
    ):
        c.nvfp4_static_activation_nvfp4_weight(observer="mse")


def test_nested_configurations_round_trip():
    config = ao_core.FqnToConfig(
        {"head": None, "re:.*mlp": c.int4_weight_only(32, symmetric=True), "*": "nf4_weight_only"}
    )
    assert ao_core.config_from_json(ao_core.config_to_json(config)) == config


@pytest.mark.parametrize(
    ("make", "parameter", "value", "allowed"),
    [
        (lambda: c.Int8WeightOnlyConfig(group_size=48), "group_size", "48", "'row'"),
        (lambda: STATIC_INT8(observer="max"), "observer", "'max'", "'minmax', 'percentile', 'mse'"),
        (lambda: STATIC_FLOAT8("block"), "granularity", "'block'", "'row', 'tensor'"),
        (lambda: STATIC_FLOAT8(activation_dtype="e3m4"), "activation_dtype", "'e3m4'", "'e5m2'"),
        (lambda: c.Int4WeightOnlyConfig(group_size=100), "group_size", "100", "32, 64, 128, 256"),
        (lambda: c.Int4WeightOnlyConfig(group_size=64.0), "group_size", "64.0", "an integer"),
        (lambda: c.Int4WeightOnlyConfig(group_size="column"), "group_size", "'column'", "'row'"),
        (lambda: c.Int4WeightOnlyConfig(symmetric=1), "symmetric", "1", "True or False"),
        (lambda: c.IntxWeightOnlyConfig(bits=0), "bits", "0", "1, 2, 3, 4, 5, 6, 7, 8"),
        (lambda: c.IntxWeightOnlyConfig(bits=9), "bits", "9", "1, 2, 3, 4, 5, 6, 7, 8"),
        (lambda: c.IntxWeightOnlyConfig(bits=True), "bits", "True", "an integer"),
        (lambda: c.NF4WeightOnlyConfig(double_quant=None), "double_quant", "None", "True"),
        (lambda: c.Float8WeightOnlyConfig(dtype="e3m4"), "dtype", "'e3m4'", "'e4m3', 'e5m2'"),
        (lambda: c.Float8WeightOnlyConfig(granularity="token"), "granularity", "'token'", "'row'"),
        (lambda: c.Float8WeightOnlyConfig(group_size="row"), "group_size", "'row'", "128"),
        (lambda: c.IntxWeightOnlyConfig(group_size="block"), "group_size", "'block'", "'tensor'"),
        (lambda: c.IntxWeightOnlyConfig(block_rows=3), "block_rows", "3", "1, 16, 32"),
        (lambda: c.UIntxWeightOnlyConfig(bits=9), "bits", "9", "1, 2, 3"),
        (lambda: c.UIntxWeightOnlyConfig(group_size=8), "group_size", "8", "32"),
        (lambda: c.BitNetWeightOnlyConfig(group_size=5), "group_size", "5", "'tensor'"),
        (lambda: c.BitNetWeightOnlyConfig(trits_per_byte=6), "trits_per_byte", "6", "4, 5"),
        (lambda: c.CodebookWeightOnlyConfig(bits=0), "bits", "0", "1, 2, 3"),
        (lambda: c.CodebookWeightOnlyConfig(group_size=64), "group_size", "64", "128, 256"),
        (lambda: c.FP4WeightOnlyConfig(group_size=16), "group_size", "16", "32, 64"),
        (lambda: c.FP6LLMWeightOnlyConfig(group_size="tensor"), "group_size", "'tensor'", "'row'"),
        (lambda: c.FPXWeightOnlyConfig(0, 3), "ebits", "0", "1, 2, 3, 4, 5"),
        (lambda: c.FPXWeightOnlyConfig(True, 3), "ebits", "True", "1, 2, 3, 4, 5"),
        (lambda: c.FPXWeightOnlyConfig(group_size=1), "group_size", "1", "32"),
        (lambda: c.Float8WeightOnlyConfig(granularity="blocks"), "granularity", "'blocks'", "'bl"),
        (lambda: c.MXWeightOnlyConfig("e3m4"), "dtype", "'e3m4'", "'e4m3', 'e5m2', 'e3m2'"),
        (
            lambda: c.MXWeightOnlyConfig(scaling_mode="up"),
            "scaling_mode",
            "'up'",
            "'floor', 'ceil'",
        ),
        (lambda: c.MXDynamicActivationMXWeightConfig("int4"), "weight_dtype", "'int4'", "'int8'"),
        (
            lambda: c.MXDynamicActivationMXWeightConfig(activation_dtype="mxfp8"),
            "activation_dtype",
            "'mxfp8'",
            "'e4m3'",
        ),
        (lambda: c.NVFP4WeightOnlyConfig(1), "per_tensor_scale", "1", "True, False"),
        (
            lambda: c.NVFP4DynamicActivationNVFP4WeightConfig("yes"),
            "per_tensor_scale",
            "'yes'",
            "True, False",
        ),
        (
            lambda: c.Float8DynamicActivationFloat8WeightConfig(weight_dtype="e3m4"),
            "weight_dtype",
            "'e3m4'",
            "'e5m2'",
        ),
        (
            lambda: c.Float8DynamicActivationFloat8WeightConfig(activation_dtype="f8e4m3"),
            "activation_dtype",
            "'f8e4m3'",
            "'e5m2'",
        ),
        (
            lambda: c.Int8DynamicActivationInt8WeightConfig(symmetric_activations="no"),
            "symmetric_activations",
            "'no'",
            "True",
        ),
        (
            lambda: c.Float8DynamicActivationFloat8WeightConfig(granularity="group"),
            "granularity",
            "'group'",
            "'tensor'",
        ),
        (
            lambda: c.Int8DynamicActivationInt4WeightConfig(group_size=16),
            "group_size",
            "16",
            "32",
        ),
    ],
)
def test_an_error_names_parameter_value_and_what_would_work(make, parameter, value, allowed):
    with pytest.raises(ConfigError) as caught:
        make()
    text = str(caught.value)
    assert text.startswith(f"{parameter}={value} ")
    # one of these values, or a value of this type
    assert allowed in (text.partition("use one of")[2] or text.partition(" takes ")[2])


def test_one_bit_needs_a_zero_point():
    with pytest.raises(ConfigError, match="use symmetric=False or bits=2"):
        c.IntxWeightOnlyConfig(bits=1, symmetric=True)
    assert c.IntxWeightOnlyConfig(bits=1, symmetric=False).bits == 1


def test_a_float_has_3_to_8_bits():
    assert {1 + ebits + mbits for ebits, mbits in FLOATS} == set(range(3, 9))
    for ebits, mbits in itertools.product((1, 2, 3, 4, 5), range(8)):
        if (ebits, mbits) in FLOATS:
            assert c.FPXWeightOnlyConfig(ebits, mbits).mbits == mbits
            continue
        with pytest.raises(ConfigError, match=f"mbits={mbits} in FPXWeightOnlyConfig with ebits="):
            c.FPXWeightOnlyConfig(ebits, mbits)
    with pytest.raises(ConfigError, match=r"ebits=4: use one of 1, 2, 3, for 3 to 8 bits"):
        c.FPXWeightOnlyConfig(4, 4)


@pytest.mark.parametrize("group", ["row", "tensor"])
def test_blocks_have_a_number_of_columns(group):
    with pytest.raises(ConfigError, match=f"block_rows=32 .*group_size='{group}'.*block_rows=1 or"):
        c.IntxWeightOnlyConfig(group_size=group, block_rows=32)
