"""Configurations with static scales pass the suite of all configurations, once they have a scale."""

from __future__ import annotations

from ao_core.testing import TransformSuite
from ao_core.testing.providers import suites_of
from ao_quant import Int8StaticActivationInt8WeightConfig
from ao_quant.configs import CALIBRATED
from ao_quant.plugin import ao_transforms

EXAMPLES = {t.name: t.example for t in ao_transforms() if t.example is not None}
EXAMPLES["asymmetric"] = Int8StaticActivationInt8WeightConfig(
    False, act_scale=0.03, act_zero_point=120
)

for _name, _config in EXAMPLES.items():
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (TransformSuite,), {"config": _config})


def test_the_suites_for_plugins_find_them():
    names = {suite.__name__ for suite in suites_of("ao-quant")}
    assert {f"transform[{name}]" for name in CALIBRATED} < names
