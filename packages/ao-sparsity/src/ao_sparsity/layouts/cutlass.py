"""`two_four_cutlass`: what torch's semi-structured matmuls for Ampere read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.sparse._semi_structured_conversions import _calculate_meta_reordering_scatter_offsets

from ao_core import WHOLE, Layout, Spec
from ao_core.ext import NO_SCALE, Parts

if TYPE_CHECKING:
    from ao_core import DType

__all__ = ["Cutlass"]

#: of a number format: rows and columns that a weight must be a multiple of, and the elements of `meta`
_STEPS = {
    "bf16": (32, 64, torch.int16),
    "fp16": (32, 64, torch.int16),
    "int8": (16, 128, torch.int32),
}


class Cutlass(Layout):
    """Two values of every four, for a weight (N, K).

    Parts: those of `two_four`, with the bytes of its index as elements of `meta`, int16 (N, K / 16) or, of
    8-bit codes, int32 (N, K / 32), in the order of CUTLASS. No bit is different.
    """

    name = "two_four_cutlass"
    canonical = False
    canonical_name = "two_four"
    auto_devices = ("cuda",)
    examples = (Spec("bf16", (1, WHOLE), NO_SCALE),)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if spec.dtype not in _STEPS:
            return f"holds {', '.join(_STEPS)}, not {spec.dtype}"
        rows, columns, _ = _STEPS[spec.dtype]
        if len(shape) != 2 or 0 in shape or shape[0] % rows or shape[1] % columns:
            return f"needs a 2-D weight of {rows} rows and {columns} columns or multiples, found {shape}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        meta = parts["index"].contiguous().view(_STEPS[spec.dtype][2])
        ordered = torch.empty_like(meta).view(-1).scatter(0, _order(meta), meta.view(-1))
        return _with(parts, "index", "meta", ordered.view(meta.shape))

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        meta = parts["meta"]
        index = meta.reshape(-1).gather(0, _order(meta)).view(meta.shape)
        return _with(parts, "meta", "index", index.view(torch.uint8))


def _order(meta: Tensor) -> Tensor:
    """Where each element of `meta` goes."""
    rows, columns = meta.shape
    place: Tensor = _calculate_meta_reordering_scatter_offsets(
        rows, columns, meta.dtype, meta.device
    )
    return place


def _with(parts: Parts, old: str, name: str, part: Tensor) -> Parts:
    """The same parts with one replaced, in its place."""
    return {name if n == old else n: part if n == old else p for n, p in parts.items()}
