"""`packed`: codes as a little-endian bit stream along the last dimension, any width from 1 to 8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ao_core.layouts.base import Geometry, Layout, PartAxis, Parts, grid_axes, make_parts, too_wide
from ao_core.numerics import pack_bits, pack_unit, unpack_bits

if TYPE_CHECKING:
    from ao_core.records import DType
    from ao_core.spec import Spec

__all__ = ["Packed"]


class Packed(Layout):
    """qdata: uint8 [..., ceil(K * bits / 8)], each row padded to whole units of `pack_unit(bits)`."""

    name = "packed"

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        return too_wide(dtype)

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        return make_parts(pack_bits(codes, dtype.bits), scale, zero_point)

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        codes = unpack_bits(parts["qdata"], dtype.bits, shape[-1])
        return codes, parts.get("scale"), parts.get("zero_point")

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        grid = grid_axes(spec, shape)
        rows = (PartAxis(1, 1),) * (len(shape) - 1)
        qdata = (*rows, PartAxis(*pack_unit(dtype.bits)))
        return {"qdata": qdata, "scale": grid, "zero_point": grid}
