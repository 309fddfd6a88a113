"""Operands of a matmul under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["autocasted"]


def autocasted(x: Any, *others: Any) -> tuple[Any, ...]:
    """Operands of a matmul in the dtype of autocast, where it is on for the device of x.

    As for torch's own matmuls, float64 and what is not a floating-point number stay; so does None.
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each.to(dtype) if _follows(each) else each for each in (x, *others))


def _follows(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point() and x.dtype != torch.float64
