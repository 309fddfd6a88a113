"""Every recipe on the fly, through files and back: those of plugins too, whoever brings them."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("recipes", Path(__file__).with_name("recipes.py"))
trials = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = trials
_spec.loader.exec_module(trials)


def test_every_recipe_is_the_same_bits_on_each_way(tmp_path):
    found = trials.tried(tmp_path)
    wrong = {name: row for name, row in found.items() if set(row.values()) != {"yes"}}
    assert not wrong
    assert {"int4_weight_only", "nf4_weight_only", "mx_weight_only", "codebook_weight_only"} <= set(
        found
    )
