"""Searches for scales and zero points: better ones than the largest magnitude gives, without data."""

from __future__ import annotations

from ao_core.numerics.scales.hqq import hqq_qparams
from ao_core.numerics.scales.mse import mse_qparams

__all__ = ["hqq_qparams", "mse_qparams"]
