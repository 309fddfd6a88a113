"""Every algorithm and every transform of a model by ao-core's suites, with formats of each kind."""

from __future__ import annotations

from ao_core.testing import AlgorithmSuite, ModelTransformSuite
from ao_quant import Int4WeightOnlyConfig, NVFP4WeightOnlyConfig, UIntxWeightOnlyConfig
from ao_quant.algorithms.records import ALGORITHMS
from ao_quant.configs import (
    AutoRoundConfig,
    AWQConfig,
    BiasCorrectionConfig,
    BlockQATConfig,
    ClipConfig,
    EqualizeConfig,
    GPTQConfig,
    ImatrixConfig,
    LowRankConfig,
    QronosConfig,
    RotateConfig,
    SmoothQuantConfig,
)

RECORDS = {record.config_type: record for record in ALGORITHMS}


class TestGPTQ(AlgorithmSuite):
    record, config = RECORDS[GPTQConfig], GPTQConfig(Int4WeightOnlyConfig(32))
    error_range = (0.05, 1.0)


class TestGPTQOfFloats(AlgorithmSuite):
    record, config = RECORDS[GPTQConfig], GPTQConfig(NVFP4WeightOnlyConfig(), order="groups")
    error_range = (0.05, 1.0)


class TestQronos(AlgorithmSuite):
    """Matrices alone have no other inputs than they had, so it is GPTQ."""

    record, config = RECORDS[QronosConfig], QronosConfig(Int4WeightOnlyConfig(32))
    error_range = (0.05, 1.0)


class TestImatrix(AlgorithmSuite):
    record, config = RECORDS[ImatrixConfig], ImatrixConfig(UIntxWeightOnlyConfig(3, 32))
    error_range = (0.2, 1.0)


class TestClip(AlgorithmSuite):
    record, config = RECORDS[ClipConfig], ClipConfig(UIntxWeightOnlyConfig(3, 32))
    error_range = (0.2, 1.0)


class TestBlockQAT(AlgorithmSuite):
    record = RECORDS[BlockQATConfig]
    config = BlockQATConfig(UIntxWeightOnlyConfig(3, 32), lr=1e-3)


class TestAutoRound(AlgorithmSuite):
    record = RECORDS[AutoRoundConfig]
    config = AutoRoundConfig(UIntxWeightOnlyConfig(3, 32), iterations=20, start="importance")
    error_range = (0.1, 1.0)


class TestBiasCorrection(AlgorithmSuite):
    """Its weights are those of the base, so the error of matrices alone is that of rounding to nearest."""

    record = RECORDS[BiasCorrectionConfig]
    config = BiasCorrectionConfig(UIntxWeightOnlyConfig(3, 32))
    error_range = (0.9, 1.0)


class TestAWQ(ModelTransformSuite):
    config = AWQConfig()


class TestSmoothQuant(ModelTransformSuite):
    config = SmoothQuantConfig()


class TestEqualize(ModelTransformSuite):
    config = EqualizeConfig()


class TestRotate(ModelTransformSuite):
    config = RotateConfig()


class TestLowRank(ModelTransformSuite):
    config = LowRankConfig(rank=4)
