"""Training with low-precision matmuls: float8, MX, int8 and 4-bit floats, checked and reported."""

from __future__ import annotations

from ao_core.ext import stochastic_rounding
from ao_float8.__about__ import __version__
from ao_float8.config import MIN_MEAN_DIM, Float8LinearConfig, Float8Matmul
from ao_float8.convert import EmulationWarning, convert_to_float8_training, float8_fallback
from ao_float8.telemetry import (
    NonFiniteWarning,
    PrecisionRecord,
    PrecisionTelemetry,
    StepWarning,
    UnderflowWarning,
    precision_telemetry,
)
from ao_float8.training import (
    BitNetTrainingConfig,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyTrainingConfig,
    MXTrainingConfig,
    NVFP4TrainingConfig,
)

__all__ = [
    "MIN_MEAN_DIM",
    "BitNetTrainingConfig",
    "EmulationWarning",
    "Float8LinearConfig",
    "Float8Matmul",
    "Int8MixedPrecisionTrainingConfig",
    "Int8WeightOnlyTrainingConfig",
    "MXTrainingConfig",
    "NVFP4TrainingConfig",
    "NonFiniteWarning",
    "PrecisionRecord",
    "PrecisionTelemetry",
    "StepWarning",
    "UnderflowWarning",
    "__version__",
    "convert_to_float8_training",
    "float8_fallback",
    "precision_telemetry",
    "stochastic_rounding",
]
