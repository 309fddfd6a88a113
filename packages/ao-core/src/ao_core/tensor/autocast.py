"""Operands of a matmul under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["autocasted", "without_autocast"]


def autocasted(x: Any, *others: Any) -> tuple[Any, ...]:
    """Operands of a matmul in the dtype of autocast, where it is on for the device of x.

    As for torch's own matmuls, float64 and what is not a floating-point number stay; so does None.
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each.to(dtype) if _follows(each) else each for each in (x, *others))


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which operations on the device of x are not cast."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _follows(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point() and x.dtype != torch.float64
