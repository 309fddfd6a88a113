"""Quantization-aware training: weights are trained while they are rounded as they will be stored."""

from __future__ import annotations

from ao_quant.qat.delay import Delay
from ao_quant.qat.distill import qad_loss
from ao_quant.qat.proximal import ProximalOptimizer, inverse_slope
from ao_quant.qat.scales import store_scales_, train_scales_
from ao_quant.qat.schedule import TwoStageLR
from ao_quant.qat.start import start_from_

__all__ = [
    "Delay",
    "ProximalOptimizer",
    "TwoStageLR",
    "inverse_slope",
    "qad_loss",
    "start_from_",
    "store_scales_",
    "train_scales_",
]
