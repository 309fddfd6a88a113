"""`enable_fsdp_float8_all_gather` of the configuration, by recipe."""

from __future__ import annotations

import pytest
from torch import nn

from ao_core import ComputeWeight, quantize_
from ao_core.ext import ConfigError
from ao_core.ext.compute import FLOAT8_ALL_GATHER
from ao_float8 import Float8LinearConfig


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_recipes_whose_codes_are_gathered(recipe: str) -> None:
    layer = nn.Linear(70, 33)
    config = Float8LinearConfig.from_recipe_name(recipe, enable_fsdp_float8_all_gather=True)
    quantize_(layer, config)
    assert isinstance(layer.weight, ComputeWeight)
    assert layer.weight.matmuls.output.option(FLOAT8_ALL_GATHER, False) is True


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_recipes_whose_codes_are_not(recipe: str) -> None:
    layer = nn.Linear(70, 33)
    config = Float8LinearConfig.from_recipe_name(recipe, enable_fsdp_float8_all_gather=True)
    with pytest.raises(ConfigError, match="each other's transpose"):
        quantize_(layer, config)
    assert not isinstance(layer.weight, ComputeWeight)
