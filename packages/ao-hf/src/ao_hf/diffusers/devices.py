"""The sizes of quantized parameters as accelerate takes them, which plans devices by dtypes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import CustomDtype

__all__ = ["counted_as"]

#: bytes per element of what accelerate knows
_KNOWN: dict[float, Any] = {
    0.25: CustomDtype.INT2,
    0.5: CustomDtype.INT4,
    1.0: torch.int8,
    2.0: torch.bfloat16,
    4.0: torch.float32,
    8.0: torch.float64,
}


def counted_as(sizes: Mapping[str, float]) -> tuple[dict[str, Any], float]:
    """A dtype for each parameter, and how many times larger than that one of them is at most.

    Args:
        sizes: bytes per element, by the names of parameters. Those of 4 bits with scales have 0.53, say,
            which count as 0.5; a plan for memory that is divided by the second result then fits.
    """
    known = {
        name: max((k for k in _KNOWN if k <= size), default=0.25) for name, size in sizes.items()
    }
    excess = max((sizes[name] / size for name, size in known.items()), default=1.0)
    return {name: _KNOWN[size] for name, size in known.items()}, max(excess, 1.0)
