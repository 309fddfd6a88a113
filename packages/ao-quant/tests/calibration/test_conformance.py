"""Configurations with static scales pass the suite of algorithms, and once they have a scale that of all."""

from __future__ import annotations

import pytest

from ao_core.testing import AlgorithmSuite, TransformSuite
from ao_core.testing.providers import suites_of
from ao_quant import Int8StaticActivationInt8WeightConfig
from ao_quant.configs import CALIBRATED
from ao_quant.plugin import ao_transforms

#: these models and data have outliers, or few rows; what becomes of such is in test_outliers.py
pytestmark = pytest.mark.filterwarnings("ignore:the inputs of")

EXAMPLES = {t.name: t.example for t in ao_transforms() if t.example is not None}
EXAMPLES["asymmetric"] = Int8StaticActivationInt8WeightConfig(
    False, act_scale=0.03, act_zero_point=120
)

for _name, _config in EXAMPLES.items():
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (TransformSuite,), {"config": _config})

WITHOUT_A_SCALE = {
    **{name: cls() for name, cls in CALIBRATED.items()},
    "asymmetric_percentile": Int8StaticActivationInt8WeightConfig(False, observer="percentile"),
    "mse": Int8StaticActivationInt8WeightConfig(observer="mse"),
}

for _name, _config in WITHOUT_A_SCALE.items():
    _fields = {"config": _config, "error_range": (1.0, 1.0)}  # the weights are rounded to nearest
    globals()[f"TestAlgorithm_{_name}"] = type(f"TestAlgorithm_{_name}", (AlgorithmSuite,), _fields)


def test_the_suites_for_plugins_find_them():
    names = {suite.__name__ for suite in suites_of("ao-quant")}
    for kind in ("transform", "algorithm"):
        assert {f"{kind}[{name}]" for name in CALIBRATED} < names
