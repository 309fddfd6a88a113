"""From dense values to the parts of a tensor in a block format of GGUF."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import DType, QTensor, Spec
from ao_core.ext import Parts, QuantizationError, registry
from ao_core.ext.kernels import is_sharded
from ao_core.ext.numerics import searched_at_once
from ao_quant.gguf.rounding import LEGACY, Blocks, Steps
from ao_quant.gguf.search import searched

__all__ = ["WEIGHABLE", "encode"]

#: types whose errors can be weighted -> how much the mean square of a super-block counts beside the square
#: of an element; of the ones that are not in `_SUPER`, that of a row; None: squares do not count. As in
#: llama.cpp
WEIGHABLE: dict[str, float | None] = {
    "q2_k": 1.0,
    "q3_k": 2.0,
    "q4_k": 2.0,
    "q5_k": 2.0,
    "q6_k": None,
    "iq4_nl": 2.0,
    "q4_0": 1.0,
    "q4_1": 1.0,
    "q5_0": 1.0,
    "q5_1": 1.0,
}
_SUPER = ("q2_k", "q3_k", "q4_k", "q5_k", "iq4_nl")


def encode(kind: str, x: Tensor, spec: Spec, importance: Tensor | None = None) -> QTensor:
    """`x` in the GGUF type `kind`, of which `spec` is the format for such a tensor.

    Types that the `gguf` package can encode get its bytes (but a scale beyond float16 is the greatest
    there is, not infinite); others are searched for the least squared error. Rows that the blocks do not
    divide are encoded as if they went on with zeros.

    With the importance of each element, in the shape of `x`, all types in `WEIGHABLE` are searched for the
    least sum of squared errors weighted by importance · √(σ² + x²), where σ² is the mean square around it
    times the factor there.

    Raises:
        QuantizationError: `x` is a `DTensor`.
    """
    if is_sharded(x):
        raise QuantizationError(
            f"type={kind!r}: the blocks of GGUF cannot be found in a DTensor; quantize before sharding"
        )
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    shape = layout.blocked_shape(tuple(x.shape))
    *lead, k = shape
    nested = spec.scale_dtype if isinstance(spec.scale_dtype, Spec) else None
    width, count = spec.block[-1], 1 if nested is None else nested.block[-1]
    supers, blocks = -(-k // (width * count)), -(-k // width)
    rows = torch.Size(lead).numel()
    dense = x.detach().to(torch.float32).reshape(rows, k)
    dense = F.pad(dense, (0, supers * count * width - k)).reshape(rows * supers, count, width)
    if importance is None:
        found = _in_pieces((dense,), LEGACY.get(kind) or searched, dtype, nested)
    else:
        by = F.pad(importance.float().reshape(rows, k), (0, supers * count * width - k))
        by = by.reshape(dense.shape) * _size(kind, dense, rows)
        found = _in_pieces((dense, by), searched, dtype, nested)

    def grid(values: Tensor, size: int) -> Tensor:
        return values.reshape(rows, values.numel() // max(rows, 1))[:, :size].reshape(*lead, size)

    def part(steps: Steps) -> Tensor:
        if nested is None or steps.codes is None:
            return grid(steps.of, blocks).contiguous()
        holder, fmt = registry.layouts.get(nested.layout), registry.dtypes.get(nested.dtype)
        codes, of = grid(steps.codes, blocks).contiguous(), grid(steps.of, supers).contiguous()
        parts = holder.pack(codes, of, None, nested, fmt)
        return QTensor(parts, nested, (*lead, blocks), torch.float32)

    codes = grid(found.codes, k).contiguous()
    zero_point = None if found.zero_point is None else part(found.zero_point)
    parts: Parts = layout.pack(codes, part(found.scale), zero_point, spec, dtype)
    return QTensor(parts, spec, tuple(x.shape), x.dtype)


def _size(kind: str, x: Tensor, rows: int) -> Tensor | float:
    """What the importance of each of (G, S, E) elements is multiplied with."""
    factor = WEIGHABLE[kind]
    if factor is None:
        return 1.0
    around = x if kind in _SUPER else x.view(rows, -1, *x.shape[1:])
    mean = around.square().mean(tuple(range(1, around.dim())), keepdim=True)
    return (around.square() + factor * mean).sqrt().view(x.shape)


def _in_pieces(
    given: tuple[Tensor, ...], of: Callable[..., Blocks], dtype: DType, nested: Spec | None
) -> Blocks:
    """The blocks of (G, S, E) elements, and of their weights if any, some at a time."""
    x = given[0]
    size = max(searched_at_once(x.device) // (x.shape[1] * x.shape[2]), 1)
    pieces = zip(*(each.split(size) for each in given), strict=True)
    found = [of(piece[0], dtype, nested, *piece[1:]) for piece in pieces]

    def joined(steps: list[Steps]) -> Steps:
        codes = [s.codes for s in steps if s.codes is not None]
        return Steps(torch.cat(codes) if codes else None, torch.cat([s.of for s in steps]))

    zeros = [blocks.zero_point for blocks in found if blocks.zero_point is not None]
    return Blocks(
        torch.cat([blocks.codes for blocks in found]),
        joined([blocks.scale for blocks in found]),
        joined(zeros) if zeros else None,
    )
