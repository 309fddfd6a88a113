"""`two_four`: the two values of the greatest magnitude of every four along a row, and their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ao_core.ext import Geometry, PartAxis, Parts, grid_axes, make_parts
from ao_core.ext.numerics import pack_bits, pack_unit, unpack_bits
from ao_sparsity.layouts.base import (
    SparseLayout,
    filled,
    packed_codes,
    unpacked_codes,
    zero_codes,
)
from ao_sparsity.masks import n_of_m_mask

if TYPE_CHECKING:
    from ao_core import DType, Spec

__all__ = ["TwoFour"]

#: groups whose positions a byte holds
_GROUPS = 2


class TwoFour(SparseLayout):
    """Two values of every four.

    Parts, for a tensor (…, K) of G = ceil(K / 4) groups along each row:

    - qdata: the kept codes, two per group in ascending order: (…, 2 * G) in the storage dtype, or packed as
      the layout `packed` does where they have less than 8 bits.
    - index: uint8 (…, ceil(G / 2)), 4 bits per group, the even one low: the position (0 to 3) of the first
      kept code in the low two bits, of the second in the high ones. The first is less.
    - scale, zero: as for dense values.

    A group with fewer than two nonzero values keeps zeros; rows are padded with zeros. A slice of columns
    that ends within a byte of `index` has there what the whole tensor has.
    """

    name = "two_four"

    def sparsify(self, values: Tensor, spec: Spec) -> Tensor:
        return torch.where(n_of_m_mask(values.abs(), 2, 4), values, 0)

    def sparsity(self, parts: Parts, spec: Spec, shape: tuple[int, ...]) -> float | None:
        return max(1 - 2 * _groups(shape) / shape[-1], 0.0) if shape[-1] else None

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        shape = tuple(codes.shape)
        zeros = zero_codes(codes, zero_point, spec, shape, dtype)
        codes, zeros = filled(codes, zeros, {-1: 4})
        groups = (_groups(shape), 4)
        kept = (
            n_of_m_mask((codes != zeros).to(torch.float16), 2, 4).unflatten(-1, groups).unbind(-1)
        )
        lanes = codes.unflatten(-1, groups).unbind(-1)
        first = torch.where(kept[0], lanes[0], torch.where(kept[1], lanes[1], lanes[2]))
        second = torch.where(kept[3], lanes[3], torch.where(kept[2], lanes[2], lanes[1]))
        qdata = packed_codes(torch.stack([first, second], -1).flatten(-2), dtype)
        return make_parts(qdata, scale, zero_point) | {"index": _positions(kept)}

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scale, zero_point, groups = parts.get("scale"), parts.get("zero_point"), _groups(shape)
        places = unpack_bits(parts["index"], 4, groups)
        kept = unpacked_codes(parts["qdata"], 2 * groups, dtype).unflatten(-1, (groups, 2))
        zeros = zero_codes(kept, zero_point, spec, shape, dtype)
        _, zeros = filled(zeros, zeros, {-1: 4})
        lanes = [
            torch.where(
                places & 3 == lane,
                kept[..., 0],
                torch.where(places >> 2 == lane, kept[..., 1], at),
            )
            for lane, at in enumerate(zeros.unflatten(-1, (groups, 4)).unbind(-1))
        ]
        codes = torch.stack(lanes, -1).flatten(-2)[..., : shape[-1]]
        return codes.contiguous(), scale, zero_point

    def check_parts(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> str | None:
        if reason := super().check_parts(parts, spec, shape, dtype):
            return reason
        index = parts["index"]
        rises = (index & 3) < (index >> 2 & 3)
        rises &= (index >> 4 & 3) < (index >> 6)
        if not bool(rises.all()):
            return "of the two positions that index has for a group, the first must be less"
        return None

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        grid = grid_axes(spec, shape)
        rows = (PartAxis(1, 1),) * (len(shape) - 1)
        codes, entries = pack_unit(dtype.bits) if dtype.bits < 8 else (1, 1)
        # half of the values have a code, and two at a time
        qdata = PartAxis(2 * codes, entries) if codes > 1 else PartAxis(4, 2)
        index = PartAxis(4 * _GROUPS, 1)
        return {"qdata": (*rows, qdata), "scale": grid, "zero_point": grid, "index": (*rows, index)}


def _groups(shape: tuple[int, ...]) -> int:
    return -(-shape[-1] // 4)


def _positions(kept: tuple[Tensor, ...]) -> Tensor:
    """The index from four masks of which two are true at each place."""
    gone = [(~mask).to(torch.uint8) for mask in kept]
    first = gone[0] + gone[0] * gone[1]
    second = 3 - gone[3] - gone[3] * gone[2]
    places = first | second << 2
    if places.shape[-1] % _GROUPS:
        padding = torch.full_like(places[..., :1], 0b0100)
        places = torch.cat([places, padding], -1)
    return pack_bits(places, 4)
