"""What the kernels of `tile_mask` look at of a call, whatever they are written in."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["MaskCall"]


class MaskCall(Protocol):
    """What is looked at of a call of `tile_mask`, an op of ao-sparsity that may be missing."""

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    def x_dtype(self) -> torch.dtype:
        """Dtype of the weight."""
