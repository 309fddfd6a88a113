"""`digits`: codes as digits of bytes, for formats whose number of codes is not a power of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ao_core.layouts.base import Geometry, Layout, PartAxis, Parts, grid_axes, make_parts, too_wide
from ao_core.numerics import digits_a_byte, pack_digits, unpack_digits

if TYPE_CHECKING:
    from ao_core.records import DType
    from ao_core.spec import Spec

__all__ = ["Digits"]


class Digits(Layout):
    """qdata: uint8 [..., ceil(K / n)], bytes of n digits in base `dtype.codes`: 5 of `ternary`."""

    name = "digits"

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if reason := too_wide(dtype):
            return reason
        count = digits_a_byte(dtype.codes)
        if count * dtype.bits <= 8:
            return (
                f"a byte holds {count} digits of base {dtype.codes}, no more than it holds codes of "
                f"{dtype.name} with {dtype.bits} bits; use the layout 'packed'"
            )
        return None

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        return make_parts(pack_digits(codes, dtype.codes), scale, zero_point)

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        codes = unpack_digits(parts["qdata"], dtype.codes, shape[-1])
        return codes, parts.get("scale"), parts.get("zero_point")

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        grid = grid_axes(spec, shape)
        rows = (PartAxis(1, 1),) * (len(shape) - 1)
        qdata = (*rows, PartAxis(digits_a_byte(dtype.codes), 1))
        return {"qdata": qdata, "scale": grid, "zero_point": grid}
