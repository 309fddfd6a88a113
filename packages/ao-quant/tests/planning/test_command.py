"""`ao quantize --config plan.json`: a plan's JSON is that of a `FqnToConfig`, with more beside it."""

from __future__ import annotations

import copy

import pytest

from ao_core import open_checkpoint, quantize_, quantize_checkpoint, save_model
from ao_core.ext import ConfigError
from ao_core.ext.cli import load_config
from ao_quant import QuantizationPlan, plan


def test_the_command_takes_it(model, tmp_path):
    found = plan(model, budget=60_000, measure="weight")
    found.save(tmp_path / "plan.json")
    config = load_config(str(tmp_path / "plan.json"), [])
    assert config.entries == found.entries
    save_model(model, tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "files", config)
    expected = copy.deepcopy(model)
    quantize_(expected, found)
    entries = open_checkpoint(tmp_path / "files").entries
    for name, parameter in expected.named_parameters():
        if name in entries:
            spec = getattr(parameter, "spec", None)
            assert (entries[name].spec is None) == (spec is None)
    changed = found.to_dict()
    changed["entries"][found.choices[0].fqn] = "int8_weight_only"
    with pytest.raises(ConfigError, match="it was changed"):
        QuantizationPlan.from_dict(changed)
