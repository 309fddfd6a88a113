"""Kernels that decode weights in tiles: rows for `embedding`, all of them for `dequantize`."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext import Parts, registry
from ao_kernels.cpu.codes import codes_of
from ao_kernels.cpu.grids import grid_of
from ao_kernels.cpu.library import unavailable
from ao_kernels.cpu.quantize import ELEMENTS
from ao_kernels.cpu.tiles import AFFINE, LAYOUTS, table_of

__all__ = ["TILE_KERNELS", "dequantize_tiles", "tiles_embedding"]


def tiles_embedding(ids: Tensor, w: QTensor) -> Tensor:
    """Decode only the rows that are looked up."""
    if w.dtype not in ELEMENTS:
        return tiles_embedding(ids, w.like(w.parts, dtype=torch.float32)).to(w.dtype)
    arguments = _decoding(w.parts, w.spec, w.stored_shape)
    out: Tensor = torch.ops.ao_kernels.embedding(ids, *arguments, w.dtype)
    return out


def dequantize_tiles(
    parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Dense values of `shape`, bit for bit those of the canonical layout."""
    out: Tensor = torch.ops.ao_kernels.dequantize_tiles(*_decoding(parts, spec, shape), dtype)
    return out


def _decoding(parts: Parts, spec: Spec, shape: tuple[int, ...]) -> tuple[Tensor | int | None, ...]:
    """What the ops are told of a weight."""
    tensors = (parts.get(name) for name in ("qdata", *AFFINE))
    return (*tensors, table_of(parts), *_numbers(spec, shape))


@lru_cache(maxsize=1024)
def _numbers(spec: Spec, shape: tuple[int, ...]) -> tuple[int, ...]:
    grid, codes = grid_of(spec, shape), codes_of(registry.dtypes.get(spec.dtype))
    return grid.n, grid.k, codes.bits, grid.group, grid.span


def _refuses_embedding(call: Call) -> str | None:
    return (
        None if len(call.weight_shape) == 2 else f"needs a table of rows, found {call.weight_shape}"
    )


def _refuses_dequantize(call: Call) -> str | None:
    if call.x_dtype not in ELEMENTS:
        return f"writes float32, bfloat16 and float16, not {call.x_dtype}"
    return None


TILE_KERNELS = tuple(
    Kernel(f"{layout.name}_{op}", op, layout.name, "cpu", fn, 50, unavailable, refuses)
    for op, fn, refuses in (
        ("embedding", tiles_embedding, _refuses_embedding),
        ("dequantize", dequantize_tiles, _refuses_dequantize),
    )
    for layout in LAYOUTS
)
