"""`plain`: one element after the other, in the torch dtype whose elements are the codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ao_core.layouts.base import Geometry, Layout, PartAxis, Parts, grid_axes, make_parts

if TYPE_CHECKING:
    from ao_core.records import DType
    from ao_core.spec import Spec

__all__ = ["Plain"]


class Plain(Layout):
    """qdata: `DType.storage` of the logical shape; scale and zero: one entry per block."""

    name = "plain"

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        return make_parts(codes.view(dtype.storage), scale, zero_point)

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return parts["qdata"].view(dtype.code_dtype), parts.get("scale"), parts.get("zero_point")

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        grid = grid_axes(spec, shape)
        return {"qdata": (PartAxis(1, 1),) * len(shape), "scale": grid, "zero_point": grid}
