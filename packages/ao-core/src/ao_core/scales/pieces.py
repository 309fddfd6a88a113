"""A tensor in pieces of bounded size, each as the rows of a matrix, whose scales are improved one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from torch import Tensor

from ao_core.dispatch import select
from ao_core.numerics.affine import choose_qparams, scale_to_float, zero_to_float
from ao_core.numerics.blocks import full_block
from ao_core.numerics.slabs import SLAB, searched_at_once
from ao_core.records import Call, DType
from ao_core.scales.rows import QParams, Rows
from ao_core.spec import ROW, Spec

__all__ = ["improve_qparams"]


def improve_qparams(
    x: Tensor,
    dtype: DType,
    spec: Spec,
    improve: Callable[[Rows], QParams],
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of every block: what `choose_qparams` gives, improved piece by piece.

    Besides the result, memory holds a few pieces of at most twice `searched_at_once` elements each. A block
    that is larger and not contiguous is copied. A kernel that searches rows of `x` itself, which are not
    copied, takes pieces of `SLAB` elements.

    Args:
        x: of any shape, in the layout's blocked shape.
        dtype: the number format.
        spec: block, storage of scales, kind of zero points and options are used.
        improve: rows -> the scales and zero points of those rows.
        importance: of each element, in the shape of x, which becomes `Rows.importance`.
    """
    x = x.detach()
    scale, zero_point = _start(x, dtype, spec)
    if x.numel() == 0:
        return scale, zero_point
    extents = full_block(spec.block, x.shape)
    limit = _piece_size(x, spec, extents)
    for ranges in _pieces([(0, size) for size in x.shape], extents, limit):
        place = tuple(slice(a // e, -(-b // e)) for (a, b), e in zip(ranges, extents, strict=True))
        piece = tuple(slice(a, b) for a, b in ranges)
        matrix = _matrix(x[piece], extents)
        by = None if importance is None else _matrix(importance[piece], extents)
        here = scale[place]
        start = QParams(scale_to_float(here.reshape(-1, 1)), None)
        if zero_point is not None:
            point = zero_to_float(zero_point[place].reshape(-1, 1), dtype)
            is_offset = spec.zero_point == "offset"
            start = QParams(start.scale, point / start.scale if is_offset else point)
        found = improve(Rows(matrix, dtype, spec, start, by))
        scale[place] = found.scale.reshape(here.shape).to(scale.dtype)
        if zero_point is not None and found.zero_point is not None:
            point = found.zero_point
            point = point * found.scale if spec.zero_point == "offset" else point
            stored = dtype.encode(point) if spec.zero_point == "int" else point.to(zero_point.dtype)
            zero_point[place] = stored.reshape(here.shape)
    return scale, zero_point


def _piece_size(x: Tensor, spec: Spec, extents: Sequence[int]) -> int:
    """The most elements of a piece: more where rows are a view and a kernel searches, without copies."""
    limit = 2 * searched_at_once(x.device)
    of_rows = x.is_contiguous() and all(extent == 1 for extent in extents[:-1])
    if not of_rows or not isinstance(spec.scale_dtype, str):
        return limit
    plain = Spec(spec.dtype, ROW, spec.chosen_scale_dtype, spec.zero_point)
    shape = (x.numel() // extents[-1], extents[-1])
    kernel = select(Call("search_scales", plain, shape, shape, x.dtype, x.device.type))
    return max(limit, SLAB) if kernel.priority >= 0 else limit


def _start(x: Tensor, dtype: DType, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """What `choose_qparams` gives, by a kernel of `quantize` where there is one: faster, with its codes."""
    mode = str(spec.option("mx_mode", "floor"))
    if isinstance(spec.scale_dtype, str) and x.numel():
        options = (("mx_mode", mode),)
        plain = Spec(spec.dtype, spec.block, spec.scale_dtype, spec.zero_point, options=options)
        shape = tuple(x.shape)
        kernel = select(Call("quantize", plain, shape, shape, x.dtype, x.device.type))
        if kernel.priority >= 0:
            parts = kernel.fn(x, plain)
            return parts["scale"], parts.get("zero_point")
    return choose_qparams(
        x, dtype, spec.block, spec.zero_point, spec.chosen_scale_dtype, mx_mode=mode
    )


def _pieces(
    ranges: list[tuple[int, int]], extents: Sequence[int], limit: int
) -> Iterator[list[tuple[int, int]]]:
    """A box cut into boxes of whole blocks of one shape, with at most `limit` elements or one block."""
    large = prod(b - a for a, b in ranges) > limit
    for i, ((a, b), extent) in enumerate(zip(ranges, extents, strict=True)):
        blocks = -(-(b - a) // extent)
        ragged = blocks > 1 and (b - a) % extent != 0
        if ragged or (large and blocks > 1):
            middle = a + extent * (blocks - 1 if ragged else blocks // 2)
            for half in ((a, middle), (middle, b)):
                yield from _pieces([*ranges[:i], half, *ranges[i + 1 :]], extents, limit)
            return
    yield ranges


def _matrix(x: Tensor, extents: Sequence[int]) -> Tensor:
    """A tensor of whole blocks as (blocks, elements of one)."""
    sizes = [
        part
        for size, extent in zip(x.shape, extents, strict=True)
        for part in (max(size // extent, 1), min(size, extent))
    ]
    order = [*range(0, len(sizes), 2), *range(1, len(sizes), 2)]
    matrix = x.reshape(sizes).permute(order).reshape(prod(sizes[::2]), prod(sizes[1::2]))
    return matrix.contiguous()  # sums depend on the order in memory
