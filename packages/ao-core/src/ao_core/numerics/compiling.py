"""Whether a compiler takes what is done with a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["may_be_compiled"]


def may_be_compiled(x: Tensor) -> bool:
    """Whether operations on `x` may be traced: its values are unknown then, and casts may be dropped."""
    return torch.compiler.is_compiling() or type(x) is not Tensor
