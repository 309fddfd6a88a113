"""`rank1`: the scale of a matrix element is the smaller of its row's and its column's value."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ao_core import Layout, Spec
from ao_core.ext import Parts, too_wide
from ao_core.ext.numerics import pack_bits, unpack_bits

if TYPE_CHECKING:
    from ao_core import DType

__all__ = ["Rank1"]


class Rank1(Layout):
    """qdata: rows of packed codes; rows (R, 1) and columns (1, C): scales in the scale's dtype.

    A tensor of more dimensions is the matrix of its first one and all others. The scale of an element,
    min(rows[i], columns[j]), is what the rule "rank1" chooses: the greatest of each row and column of
    such scales are the two vectors again, so nothing is lost. It is not cut: a piece would have other
    greatest elements.
    Source: Li et al., "Memory Efficient Optimizers with 4-bit States" (2023), section 4.2.
    """

    name = "rank1"
    examples = (Spec("linear4u", (1, 1), options=(("scale_rule", "rank1"),)),)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if spec.option("scale_rule", "absmax") != "rank1" or spec.block != (1, 1):
            return f"{spec}: the rank1 layout needs block=(1, 1) and the option scale_rule='rank1'"
        if spec.zero_point != "none" or not isinstance(spec.scale_dtype, str):
            return f"{spec}: the rank1 layout has no zero points and no quantized scales"
        if len(shape) < 2:
            return f"shape {shape}: a scale per row and per column needs two dimensions"
        return too_wide(dtype)

    def blocked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], prod(shape[1:]))

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        assert scale is not None  # `refuses` holds no format without one
        if not codes.numel():
            rows, columns = scale.new_ones(len(codes), 1), scale.new_ones(1, codes.shape[1])
        else:
            rows, columns = scale.amax(1, keepdim=True), scale.amax(0, keepdim=True)
        return {"qdata": pack_bits(codes, dtype.bits), "rows": rows, "columns": columns}

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        codes = unpack_bits(parts["qdata"], dtype.bits, prod(shape[1:]))
        return codes, torch.minimum(parts["rows"], parts["columns"]), None
