"""The formats with which a model is fastest on this device, by measurement."""

from __future__ import annotations

from ao_quant.autotuning.result import AutoquantReport, Exchange, Layer, Timing, Whole
from ao_quant.autotuning.tuner import CANDIDATES, OnePositionWarning, autoquant
from ao_quant.autotuning.whole import MIXED
from ao_quant.timing import Trial

__all__ = [
    "CANDIDATES",
    "MIXED",
    "AutoquantReport",
    "Exchange",
    "Layer",
    "OnePositionWarning",
    "Timing",
    "Trial",
    "Whole",
    "autoquant",
]
