"""`flat`: blocks over the flattened tensor, as optimizer state wants them."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING

from torch import Tensor

from ao_core.layouts.base import SHARED, Geometry, Layout, PartAxis, Parts, make_parts, too_wide
from ao_core.numerics import pack_bits, pack_unit, unpack_bits
from ao_core.spec import WHOLE

if TYPE_CHECKING:
    from ao_core.records import DType
    from ao_core.spec import Spec

__all__ = ["Flat"]


class Flat(Layout):
    """qdata: uint8 bit stream of all elements in order; scale and zero: one entry `block[-1]` elements.

    Codes and scales handed to `pack` are one-dimensional, as `blocked_shape` says.
    """

    name = "flat"

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if len(spec.block) != 1:
            return f"block={spec.block}: the flat layout needs one extent, e.g. (256,)"
        return too_wide(dtype)

    def blocked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(shape),)

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        return make_parts(pack_bits(codes.reshape(-1), dtype.bits), scale, zero_point)

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        codes = unpack_bits(parts["qdata"], dtype.bits, prod(shape))
        return codes, parts.get("scale"), parts.get("zero_point")

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        row = prod(shape[1:])
        values, entries = pack_unit(dtype.bits)
        grid = (SHARED,) if spec.block[0] == WHOLE else _rows(row, spec.block[0], 1)
        return {"qdata": _rows(row, values, entries), "scale": grid, "zero_point": grid}


def _rows(row: int, values: int, entries: int) -> Geometry:
    """`entries` for every `values` elements, restated for whole rows of `row` elements.

    Undeclared where several runs of `values` fill several rows: then a few rows may take fewer
    entries than the same rows among others, and no piece has the size of its own `pack`.
    """
    row = max(row, 1)
    rows = values // gcd(values, row)
    runs = rows * row // values
    return (PartAxis(rows, runs * entries),) if 1 in (rows, runs) else ()
