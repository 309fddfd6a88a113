"""A parameter that becomes another one and stays the object it is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["become"]


def become(parameter: Tensor, new: Tensor) -> bool:
    """Let `parameter` be what `new` is, so that whoever holds it holds the new one; False: torch refuses.

    Attributes that were set on it stay, and so do its gradient and a hash by identity, e.g. of the state of
    an optimizer. Torch refuses where weak references, which compiled code has, or a graph hold it. `new`
    is not to be used afterwards unless False is returned.
    """
    grad = parameter.grad
    kept = {name: value for name, value in parameter.__dict__.items() if name not in new.__dict__}
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError:
        return False
    for name, value in kept.items():
        setattr(parameter, name, value)
    if grad is not None:
        parameter.grad = grad
    return True
