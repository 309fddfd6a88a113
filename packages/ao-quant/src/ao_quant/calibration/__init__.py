"""Static scales of activations: prepare a model, show it data, convert it."""

from __future__ import annotations

from ao_quant.calibration.result import Calibration
from ao_quant.calibration.steps import OutlierWarning, calibrate, convert, discard, prepare

__all__ = ["Calibration", "OutlierWarning", "calibrate", "convert", "discard", "prepare"]
