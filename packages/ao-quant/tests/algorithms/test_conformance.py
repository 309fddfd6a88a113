"""Every algorithm by ao-core's suite, with formats of each kind."""

from __future__ import annotations

from ao_core.testing import AlgorithmSuite
from ao_quant import Int4WeightOnlyConfig, NVFP4WeightOnlyConfig, UIntxWeightOnlyConfig
from ao_quant.algorithms.records import ALGORITHMS
from ao_quant.configs import (
    AutoRoundConfig,
    AWQConfig,
    BiasCorrectionConfig,
    GPTQConfig,
    ImatrixConfig,
    SmoothQuantConfig,
)

RECORDS = {record.config_type: record for record in ALGORITHMS}


class TestGPTQ(AlgorithmSuite):
    record, config = RECORDS[GPTQConfig], GPTQConfig(Int4WeightOnlyConfig(32))
    error_range = (0.05, 1.0)


class TestGPTQOfFloats(AlgorithmSuite):
    record, config = RECORDS[GPTQConfig], GPTQConfig(NVFP4WeightOnlyConfig(), order="groups")
    error_range = (0.05, 1.0)


class TestImatrix(AlgorithmSuite):
    record, config = RECORDS[ImatrixConfig], ImatrixConfig(UIntxWeightOnlyConfig(3, 32))
    error_range = (0.2, 1.0)


class TestAWQ(AlgorithmSuite):
    record, config = RECORDS[AWQConfig], AWQConfig(Int4WeightOnlyConfig(32), steps=4)
    error_range = (0.2, 1.0)


class TestSmoothQuant(AlgorithmSuite):
    """Its error is that of activations too, which this suite does not measure: see test_using."""

    record, config = RECORDS[SmoothQuantConfig], SmoothQuantConfig()
    error_range = (0.05, 40.0)


class TestAutoRound(AlgorithmSuite):
    record = RECORDS[AutoRoundConfig]
    config = AutoRoundConfig(UIntxWeightOnlyConfig(3, 32), iterations=20, start="importance")
    error_range = (0.1, 1.0)


class TestBiasCorrection(AlgorithmSuite):
    """Its weights are those of the base, so the error of matrices alone is that of rounding to nearest."""

    record = RECORDS[BiasCorrectionConfig]
    config = BiasCorrectionConfig(UIntxWeightOnlyConfig(3, 32))
    error_range = (0.9, 1.0)
