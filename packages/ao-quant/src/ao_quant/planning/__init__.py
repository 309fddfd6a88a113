"""The best format for each parameter within a budget of bytes, bits or divergence."""

from __future__ import annotations

from ao_quant.planning.planner import CANDIDATES, plan
from ao_quant.planning.result import Choice, Option, QuantizationPlan

__all__ = ["CANDIDATES", "Choice", "Option", "QuantizationPlan", "plan"]
