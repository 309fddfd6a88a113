"""Every recipe passes the suite of its kind that ao-core ships, and one of each kind both."""

from __future__ import annotations

from typing import Any

from ao_core.testing import ComputeSuite, TransformSuite
from ao_float8.recipes import RECIPES
from ao_float8.training import Int8WeightOnlyTrainingConfig

#: least SQNR of a model, in dB, where the suites' own is too much
_LEAST = {"bitnet_training": 1.0, "mx_training/mxfp4": 8.0, "nvfp4_training": 8.0}
_LOSS_GAP = {"bitnet_training": 0.2}

#: float8 with its rules, weights in another class, and gradients straight through; others are alike
_BOTH = ("float8/rowwise", "int8_weight_only_training", "bitnet_training")

for _recipe in RECIPES:
    _suites: list[type[Any]] = [TransformSuite] if _recipe.name in _BOTH else []
    if not isinstance(_recipe.config, Int8WeightOnlyTrainingConfig):  # it has no casts
        _suites.append(ComputeSuite)
    for _suite in _suites:
        _attributes: dict[str, Any] = {"config": _recipe.config}
        if _recipe.name in _LEAST:
            _attributes["sqnr_range"] = (_LEAST[_recipe.name], 75.0)
        if _recipe.name in _LOSS_GAP:
            _attributes["loss_gap"] = _LOSS_GAP[_recipe.name]
        _name = f"Test_{_recipe.name.replace('/', '_')}_{_suite.__name__}"
        globals()[_name] = type(_name, (_suite,), _attributes)
