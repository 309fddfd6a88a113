"""ao-core finds this package by its entry point, and takes from it what it declares."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ao_core.ext import registry
from ao_quant import plugin
from ao_quant.configs import CALIBRATED, CONFIGS, LoRAQATConfig, QATConfig

#: formats of linear layers alone
WITHOUT_RECIPE = {"trellis_weight_only"}
#: what is done with a configuration of weights, not a format
TRAINING = {"qat": QATConfig, "lora_qat": LoRAQATConfig}


def test_records_come_from_this_distribution():
    for transform in plugin.ao_transforms():
        assert registry.transforms.get(transform.name) is transform
        assert registry.transforms.provider(transform.name) == "ao-quant"
    for recipe in plugin.ao_recipes():
        assert registry.recipes.get(recipe.name) is recipe
        assert registry.recipes.provider(recipe.name) == "ao-quant"


def test_one_transform_and_one_recipe_for_every_configuration():
    transforms = {t.name: t.config_type for t in plugin.ao_transforms()}
    assert transforms == CONFIGS | CALIBRATED | TRAINING
    recipes = {r.name: r for r in plugin.ao_recipes()}
    assert CONFIGS.keys() - recipes.keys() == WITHOUT_RECIPE
    for name, recipe in recipes.items():
        assert type(recipe.config) is CONFIGS[name.partition("/")[0]]
        assert recipe.summary


def test_what_waits_for_calibration_is_no_recipe_and_has_an_example():
    recipes = {r.name.partition("/")[0] for r in plugin.ao_recipes()}
    for transform in plugin.ao_transforms():
        assert (transform.name in CALIBRATED) == (transform.example is not None)
        no_recipe = {*CALIBRATED, *WITHOUT_RECIPE, *TRAINING}
        assert (transform.name in no_recipe) == (transform.name not in recipes)


def test_recipes_differ():
    configs = [recipe.config for recipe in plugin.ao_recipes()]
    assert len(set(configs)) == len(configs)


def test_the_api_is_that_of_the_hooks():
    assert plugin.ao_api() == (0, 1)


@pytest.mark.slow
def test_a_recipe_is_found_by_name_without_importing_the_package():
    code = (
        "import sys, ao_core, torch\n"
        "assert 'ao_quant' not in sys.modules\n"
        "layer = torch.nn.Linear(8, 8)\n"
        "report = ao_core.quantize_(layer, 'int8_weight_only')\n"
        "assert [r.status for r in report] == ['changed', 'unchanged']\n"
        "assert 'torch._inductor' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
