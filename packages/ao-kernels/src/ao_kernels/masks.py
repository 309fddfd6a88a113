"""The call of the op `tile_mask`, as its kernels on the CPU and on GPUs read it."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["MaskCall"]


class MaskCall(Protocol):
    """The fields that kernels read. The op is one of ao-sparsity, which need not be installed."""

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    def x_dtype(self) -> torch.dtype:
        """Dtype of the weight."""
