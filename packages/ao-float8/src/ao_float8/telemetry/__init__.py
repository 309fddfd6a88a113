"""What low precision does to each operand of each matmul, while a model trains."""

from __future__ import annotations

from ao_float8.telemetry.context import PrecisionTelemetry, precision_telemetry
from ao_float8.telemetry.measure import PrecisionRecord
from ao_float8.telemetry.warn import NonFiniteWarning, StepWarning, UnderflowWarning

__all__ = [
    "NonFiniteWarning",
    "PrecisionRecord",
    "PrecisionTelemetry",
    "StepWarning",
    "UnderflowWarning",
    "precision_telemetry",
]
