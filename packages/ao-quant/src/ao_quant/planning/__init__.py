"""The best format for each parameter within a budget of bytes, bits or divergence.

Plans of something else than parameters, such as caches, are made of `divergence`, which says what answers
lose, `solve`, which chooses, and `rank_correlation`.
"""

from __future__ import annotations

from ao_quant.planning.measure import divergence
from ao_quant.planning.planner import CANDIDATES, plan
from ao_quant.planning.ranks import rank_correlation
from ao_quant.planning.result import Choice, Option, QuantizationPlan
from ao_quant.planning.solve import solve

__all__ = [
    "CANDIDATES",
    "Choice",
    "Option",
    "QuantizationPlan",
    "divergence",
    "plan",
    "rank_correlation",
    "solve",
]
