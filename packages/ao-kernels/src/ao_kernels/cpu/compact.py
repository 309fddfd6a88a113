"""Layouts whose codes take less memory than tiles, which the C++ matmul makes of them in the cache.

- `cpu_digits`: formats of 3 values, 1.6 bits each, for the canonical layout `digits`.
- `cpu_two_four`: two of every four codes of 4 or 8 bits, for the canonical layout `two_four`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Call, DType, Kernel, Layout, QTensor, Spec
from ao_core.ext import Parts, registry
from ao_core.ext.numerics import pack_bits, unpack_bits
from ao_kernels.cpu.codes import codes_of
from ao_kernels.cpu.grids import SIDE, grid_of
from ao_kernels.cpu.library import unavailable, want_alone
from ao_kernels.cpu.linear import describe, linear_by, refuses, stored_matmul
from ao_kernels.cpu.tiles import LAYOUTS, CpuTiles

__all__ = ["COMPACT_KERNELS", "COMPACT_LAYOUTS", "CpuDigits", "CpuTwoFour"]

#: codes of 3 values in a byte, in so many tiles; bytes of a tile of 2 bits
_DIGITS, _TILE = 5, 64


class Compact(Layout):
    """What both have in common: the parts of tiles, but for `qdata`."""

    canonical = False
    auto_devices = ("cpu",)
    #: `StoredAs` of csrc/cpu/linear/kernels.h
    stored: int

    def tiles(self, dtype: DType) -> CpuTiles:
        """The layout of the tiles that are made of the codes."""
        return LAYOUTS[dtype.bits == 8]

    def fill(self, dtype: DType) -> int:
        """What bytes of tiles are combined with by an exclusive or, once they are made of stored codes."""
        raise NotImplementedError

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why this layout cannot hold such a tensor."""
        if len(shape) != 2:
            return f"needs a weight (N, K), found {shape}"
        if reason := self.tiles(dtype).refuses(spec, shape, dtype):
            return reason
        group = grid_of(spec, shape).group
        if group < shape[1] and group % SIDE:
            return f"has groups of whole multiples of {SIDE} columns, found {group}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Compact parts; raises `RuntimeError` where the C++ library cannot be loaded."""
        tiles = self.tiles(dtype)
        codes, scale, zero_point = registry.layouts.get(self.canonical_name).unpack(
            parts, spec, shape, dtype
        )
        dense = registry.layouts.get(tiles.canonical_name)
        out = tiles.from_canonical(
            dense.pack(codes, scale, zero_point, spec, dtype), spec, shape, dtype
        )
        return out | {"qdata": self.shrunk(out["qdata"], parts, shape, dtype)}

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Parts of the canonical layout; raises `RuntimeError` as `from_canonical` does."""
        tiles = self.tiles(dtype)
        of_tiles = parts | {"qdata": self.expanded(parts["qdata"], shape, dtype)}
        dense = tiles.to_canonical(of_tiles, spec, shape, dtype)
        codes, scale, zero_point = registry.layouts.get(tiles.canonical_name).unpack(
            dense, spec, shape, dtype
        )
        out = registry.layouts.get(self.canonical_name).pack(codes, scale, zero_point, spec, dtype)
        return out | self.kept(parts, shape, dtype)

    def shrunk(self, qdata: Tensor, parts: Parts, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """`qdata` of this layout, from tiles (row blocks, tiles, bytes) and the canonical parts."""
        raise NotImplementedError

    def expanded(self, qdata: Tensor, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The tiles that the C++ code makes of it."""
        raise NotImplementedError

    def kept(self, parts: Parts, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Canonical parts that do not follow from codes."""
        return {}


class CpuDigits(Compact):
    """Five codes of 3 values in a byte. Parts are those of `cpu_tiles`, but for `qdata`.

    - qdata: uint8 (row blocks, fives of tiles, 256). Of five tiles of 2 bits, byte i has 20 codes, 4 in each
      tile. They are the digits in base 3, five at a time, of the bytes i, 64 + i, 128 + i and 192 + i.
    """

    name = "cpu_digits"
    canonical_name = "digits"
    stored = 1

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why this layout cannot hold such a tensor."""
        if dtype.bits != 2 or dtype.codes != 3:
            return f"holds formats of 3 values in 2 bits, and {dtype.name} has {dtype.codes}"
        return super().refuses(spec, shape, dtype)

    def fill(self, dtype: DType) -> int:
        """The bits of a code that are turned in tiles, in each of the 4 codes of a byte."""
        return codes_of(dtype).flip * 0x55

    def shrunk(self, qdata: Tensor, parts: Parts, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Digits of bytes, from tiles."""
        bytes_ = qdata ^ self.fill(dtype)
        codes = torch.stack([bytes_ >> 2 * j & 3 for j in range(4)], -2).flatten(-3, -2)
        codes = F.pad(codes, (0, 0, 0, -codes.shape[-2] % (4 * _DIGITS)))
        digits = codes.unflatten(-2, (-1, 4, _DIGITS)).unbind(-2)
        packed: Tensor = digits[-1]
        for digit in reversed(digits[:-1]):
            packed = packed * 3 + digit
        return packed.flatten(-2).contiguous()

    def expanded(self, qdata: Tensor, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Tiles, from digits of bytes."""
        rest, digits = qdata.unflatten(-1, (4, _TILE)), []
        for _ in range(_DIGITS):
            digits.append(rest % 3)
            rest = rest // 3
        codes = torch.stack(digits, -2).flatten(-4, -2).unflatten(-2, (-1, 4))
        packed: Tensor = codes[..., 0, :]
        for j in range(1, 4):
            packed = packed | codes[..., j, :] << 2 * j
        return packed[..., : -(-shape[-1] // SIDE), :] ^ self.fill(dtype)


class CpuTwoFour(Compact):
    """Two of every four codes of 4 or 8 bits. Parts are those of `cpu_tiles`, but for `qdata`.

    - qdata: uint8 (row blocks, tiles, 96 or 160). A tile has 16 rows and 4 quads of columns. For each quad
      there are the 16 first codes and the 16 second ones; codes of 4 bits share bytes, the first one low.
      Then there are 16 bytes for each two quads with the places of both codes, 2 bits each, the first code of
      the first quad lowest. Codes are turned so that 0 stands for the value 0.
    """

    name = "cpu_two_four"
    canonical_name = "two_four"
    stored = 2

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why this layout cannot hold such a tensor."""
        if dtype.bits not in (4, 8) or dtype.kind not in ("int", "float") or not dtype.has_zero:
            return f"holds integers and floats of 4 and 8 bits that have 0, not {dtype.name}"
        if spec.zero_point != "none":
            return f"has no zero points, and this format has zero_point={spec.zero_point!r}"
        return super().refuses(spec, shape, dtype)

    def sparsity(self, parts: Parts, spec: Spec, shape: tuple[int, ...]) -> float | None:
        """The share of elements that are not stored."""
        return registry.layouts.get(self.canonical_name).sparsity(parts, spec, shape)

    def fill(self, dtype: DType) -> int:
        """The stored code of 0, in a byte."""
        zero = codes_of(dtype).values.index(0.0)
        return zero if dtype.bits == 8 else zero * 0x11

    def shrunk(self, qdata: Tensor, parts: Parts, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Codes and places, from the canonical parts."""
        bits, groups = dtype.bits, -(-shape[-1] // 4)
        codes = parts["qdata"].view(torch.uint8)
        if bits < 8:
            codes = unpack_bits(codes, bits, 2 * groups)
        turned = codes_of(dtype).flip ^ codes_of(dtype).values.index(0.0)
        kept = _by_tiles(codes ^ turned, 8, 0)  # (row blocks, tiles, 16 rows, 8 codes)
        kept = kept.unflatten(-1, (4, 2)).permute(0, 1, 3, 4, 2)
        kept = (
            kept.flatten(-3) if bits == 8 else (kept[..., 0, :] | kept[..., 1, :] << 4).flatten(-2)
        )
        places = _by_tiles(unpack_bits(parts["index"], 4, groups), 4, 0b0100)
        places = places.unflatten(-1, (2, 2)).permute(0, 1, 3, 4, 2)
        places = (places[..., 0, :] | places[..., 1, :] << 4).flatten(-2)
        return torch.cat([kept, places], -1)

    def _unshrunk(self, qdata: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Codes (row blocks, tiles, 4 quads, 2, 16 rows) and places (row blocks, tiles, 4 quads, 16 rows)."""
        kept, places = qdata[..., :-32], qdata[..., -32:].unflatten(-1, (2, SIDE))
        places = torch.stack([places & 15, places >> 4], -2).flatten(-3, -2)
        if bits == 8:
            return kept.unflatten(-1, (4, 2, SIDE)), places
        kept = kept.unflatten(-1, (4, SIDE))
        return torch.stack([kept & 15, kept >> 4], -2), places

    def expanded(self, qdata: Tensor, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Tiles, of which all codes but the stored ones are those of 0."""
        kept, places = self._unshrunk(qdata, dtype.bits)
        lanes = qdata.new_zeros(*places.shape, 4)
        at = torch.stack([places & 3, places >> 2], -1).long()
        quads = lanes.scatter(-1, at, kept.transpose(-1, -2))  # (…, 4 quads, 16 rows, 4 columns)
        if dtype.bits < 8:
            quads = quads[..., ::2, :, :] | quads[..., 1::2, :, :] << 4
        return quads.flatten(-3) ^ self.fill(dtype)

    def kept(self, parts: Parts, shape: tuple[int, ...], dtype: DType) -> Parts:
        """The codes that are stored, and where: a stored 0 has a place, too."""
        bits, groups = dtype.bits, -(-shape[-1] // 4)
        codes, places = self._unshrunk(parts["qdata"], bits)
        turned = codes_of(dtype).flip ^ codes_of(dtype).values.index(0.0)
        codes = _by_rows(codes.permute(0, 4, 1, 2, 3), shape[0], 2 * groups) ^ turned
        places = _by_rows(places.permute(0, 3, 1, 2), shape[0], groups)
        if groups % 2:
            places = F.pad(places, (0, 1), value=0b0100)
        qdata = codes.view(dtype.storage) if bits == 8 else pack_bits(codes, bits)
        return {"qdata": qdata, "index": pack_bits(places, 4)}


def _by_tiles(rows: Tensor, columns: int, padding: int) -> Tensor:
    """(N, G) as (row blocks, tiles, 16, columns), with `padding`."""
    pad = (0, -rows.shape[1] % columns, 0, -rows.shape[0] % SIDE)
    tiles: Tensor = F.pad(rows, pad, value=padding).unflatten(0, (-1, SIDE))
    return tiles.unflatten(-1, (-1, columns)).transpose(1, 2)  # type: ignore[no-any-return]


def _by_rows(tiles: Tensor, n: int, columns: int) -> Tensor:
    """(row blocks, 16, …) as (N, columns), without what is more."""
    return tiles.flatten(2).flatten(0, 1)[:n, :columns].contiguous()


def _matmul(w: QTensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    layout = w.layout_record
    assert isinstance(layout, Compact)
    return stored_matmul(w, layout.stored, layout.fill(w.format))


def compact_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """One call into C++."""
    return linear_by(_matmul, x, w, bias)


def _describe(call: Call) -> str:
    return f"{describe(call)}, codes made tiles in the cache"


COMPACT_LAYOUTS = (CpuDigits(), CpuTwoFour())
COMPACT_KERNELS = tuple(
    # above those for the canonical layouts
    Kernel(
        f"{layout.name}_as_tiles", "linear", layout.name, "cpu", compact_linear, 60, unavailable,
        refuses("(N, K)"), _describe, alone=want_alone,
    )
    for layout in COMPACT_LAYOUTS
)  # fmt: skip
