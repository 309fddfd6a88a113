"""Transforms of ao-core, and one for training, pass the suites that plugin authors use."""

from __future__ import annotations

import pytest

from ao_core import Config
from ao_core.recipes import WeightOnlyConfig
from ao_core.testing import ComputeSuite, TransformSuite


class TestWeightOnly(TransformSuite):
    config = WeightOnlyConfig()


class TestLowPrecisionMatmuls(ComputeSuite):
    @pytest.fixture(autouse=True)
    def _configured(self, rowwise_training: type[Config]) -> None:
        self.config = rowwise_training()
