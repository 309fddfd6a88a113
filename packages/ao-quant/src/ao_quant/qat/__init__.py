"""Quantization-aware training: weights are trained while they are rounded as they will be stored."""

from __future__ import annotations

from ao_quant.qat.delay import Delay
from ao_quant.qat.distill import qad_loss

__all__ = ["Delay", "qad_loss"]
