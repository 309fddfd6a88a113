"""The kernel of `tile_mask` on the CPU: all patterns of 16 tiles at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Kernel
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.quantize import ELEMENTS
from ao_kernels.masks import MaskCall

__all__ = ["MASK_KERNELS", "tile_mask"]


def tile_mask(weight: Tensor) -> Tensor:
    """What stays of a matrix, 2:4 along rows and columns at once, bool; scores are float32."""
    mask: Tensor = torch.ops.ao_kernels.two_four_mask(weight.detach())
    return mask


def _refuses(call: MaskCall) -> str | None:
    if call.x_dtype not in ELEMENTS:
        return f"reads float32, bfloat16 and float16, not {call.x_dtype}"
    return None


def _describe(call: MaskCall) -> str:
    return isa()


MASK_KERNELS = (
    Kernel(
        "cpu_tile_mask",
        "tile_mask",
        "two_four",
        "cpu",
        tile_mask,
        50,
        unavailable,
        _refuses,
        _describe,
    ),
)
