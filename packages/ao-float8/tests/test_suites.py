"""Every recipe passes the suite of its kind that ao-core ships, and one of each configuration both."""

from __future__ import annotations

from typing import Any

from ao_core.testing import ComputeSuite, TransformSuite
from ao_float8.recipes import RECIPES
from ao_float8.training import Int8WeightOnlyTrainingConfig

#: least SQNR of a model, in dB, where the suites' own is too much
_LEAST = {"bitnet_training": 1.0, "mx_training/mxfp4": 8.0, "nvfp4_training": 8.0}
_LOSS_GAP = {"bitnet_training": 0.2}

_tried: set[type[Any]] = set()
for _recipe in RECIPES:
    _suites: list[type[Any]] = []
    if type(_recipe.config) not in _tried:
        _tried.add(type(_recipe.config))
        _suites.append(TransformSuite)
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
