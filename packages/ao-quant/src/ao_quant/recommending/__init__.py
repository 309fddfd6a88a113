"""Which recipe to take: whole models in several recipes, compared by size, quality and time."""

from __future__ import annotations

from ao_quant.recommending.comparing import CANDIDATES, recommend
from ao_quant.recommending.result import Compared, Recommendation

__all__ = ["CANDIDATES", "Compared", "Recommendation", "recommend"]
