"""`Layout`: how the parts of a quantized tensor lie in memory. Stateless; describes, never holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts.forms import forms_of, unlike
from ao_core.layouts.values import scale_values, zero_values
from ao_core.numerics import dequantize_affine, full_block
from ao_core.spec import WHOLE

if TYPE_CHECKING:
    from ao_core.records import DType
    from ao_core.spec import Spec

__all__ = [
    "SHARED",
    "Geometry",
    "Layout",
    "PartAxis",
    "Parts",
    "Quantizer",
    "grid_axes",
    "make_parts",
    "too_wide",
]

#: part name -> tensor; the scale may itself be a quantized tensor
Parts = dict[str, Tensor]
#: dense values of the blocked shape -> the codes, scale and zero point that `Layout.pack` takes
Quantizer = Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor | None]]


class PartAxis(NamedTuple):
    """Along one dimension, `entries` stored elements of a part belong to `values` logical ones.

    (1, 1): one each. (2, 1): two 4-bit codes in a byte. (8, 3): eight 3-bit codes in three bytes.
    (128, 1): one scale per 128 elements.
    """

    #: logical elements
    values: int
    #: stored elements of the part
    entries: int


#: The part does not change along this dimension: all of it belongs to any slice.
SHARED = None
#: One axis a logical dimension. A shorter tuple: the part cannot be cut along the missing ones.
Geometry = tuple[PartAxis | None, ...]


class Layout:
    """Arranges codes, scales and zero points as named parts.

    A subclass sets `name` and implements `pack`, `unpack` and `geometry`; slicing, concatenation,
    sharding and gathering rows then follow from the geometry. A layout made for one kernel sets
    `canonical = False` and `canonical_name`, implements `from_canonical` and `to_canonical` (bit-exact
    both ways), and lists in `auto_devices` where `quantize_` may choose it.

    A layout with parts that hold values of their own, as outliers kept in high precision, sets `affine`
    to False and implements `encode` and `decode` too: everything that reads or writes dense values goes
    through these two.
    """

    name: str
    #: may stand in a checkpoint
    canonical: bool = True
    #: for others: the canonical layout they convert to and from; see also `canonical_of`
    canonical_name: str = ""
    #: device types on which `quantize_` and `.to(device)` may choose this layout by themselves
    auto_devices: tuple[str, ...] = ()
    #: for others: device types on which the conversions run; empty: on any
    conversion_devices: tuple[str, ...] = ()
    #: for others: every part of a 3-D tensor is that of its slices along dimension 0, stacked, so that
    #: the weight of one expert can be taken from it without a conversion
    stacked: bool = False
    #: for others: each entry along dimension 0 of a part, but for those in `common`, belongs to so many rows
    #: of a matrix, the last one maybe to fewer. Matrices then join along rows without a conversion. 0: not so
    row_block: int = 0
    #: for others: parts that are the same for all matrices of a format
    common: tuple[str, ...] = ()
    #: the value of each element follows from its code, scale and zero point, as `Spec` says: `pack` and
    #: `unpack` keep all that there is. False: the parts hold more, which `encode` and `decode` know of
    affine: bool = True
    #: names of the options of a `Spec` that it reads, e.g. "blocksize"
    options: tuple[str, ...] = ()
    #: formats that the conformance suite tries next to its own, for layouts that hold none of those
    examples: tuple[Spec, ...] = ()

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why this layout cannot hold such a tensor."""
        return None

    def blocked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape over which blocks are counted; codes and scales of `pack` and `unpack` have it."""
        return shape

    def sparsify(self, values: Tensor, spec: Spec) -> Tensor:
        """What of dense `values`, of the blocked shape, this layout can hold: others become zero.

        Done before scales are chosen, so that they follow what stays. Twice is as good as once.
        """
        return values

    def sparsity(self, parts: Parts, spec: Spec, shape: tuple[int, ...]) -> float | None:
        """The share of elements that are not stored; None where all are."""
        return None

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        """Parts from `codes` of the blocked shape, with one `scale` and one `zero_point` per block.

        Where `sparsify` makes zeros, the codes are those of zero.
        """
        raise NotImplementedError

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Inverse of `pack`: (codes, scale, zero)."""
        raise NotImplementedError

    def encode(self, values: Tensor, spec: Spec, dtype: DType, quantize: Quantizer) -> Parts:
        """Parts that stand for dense `values`, contiguous and of the logical shape.

        `quantize` finds scales for the values that it is given, which need not be those of the tensor,
        and encodes them: by the spec, by a scale method, or by scales that the caller has. A layout
        without parts of its own has nothing to add to what it gives.
        """
        dense = values.reshape(self.blocked_shape(tuple(values.shape)))
        return self.pack(*quantize(self.sparsify(dense, spec)), spec, dtype)

    def decode(
        self,
        parts: Parts,
        spec: Spec,
        shape: tuple[int, ...],
        dtype: DType,
        out_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Dense values of `shape`, computed in float32 and rounded once to `out_dtype`.

        Encoding them again must not lose what the number format keeps.
        """
        codes, scale, zero_point = self.unpack(parts, spec, shape, dtype)
        by, point, is_offset = (
            scale_values(scale),
            zero_values(zero_point),
            spec.zero_point == "offset",
        )
        dense = dequantize_affine(
            codes, dtype, spec.block, by, point, out_dtype, is_offset=is_offset
        )
        return dense.reshape(shape)

    def round_column(
        self, x: Tensor, scale: Tensor, spec: Spec, dtype: DType
    ) -> tuple[Tensor, Tensor]:
        """The nearest codes of one column, and their values; for layouts that are not affine.

        Such a layout is calibrated column by column only if it implements this: what is stored of a column
        does not depend on others.

        Args:
            x: (N,), a column of a matrix.
            scale: (N,), float32 and positive.
            spec: the format.
            dtype: the number format of `spec`.

        Returns:
            The codes, as many as `unpack` gives for a column, and the values (N,) in float32.

        Raises:
            UnsupportedOp: the layout does not declare it.
        """
        raise UnsupportedOp(f"layout {self.name!r} has no way to round one column alone")

    def check_parts(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> str | None:
        """None, or a sentence that says why these cannot be the parts of a tensor of the logical shape.

        Kernels rely on it where parts come from a file, which may be anybody's, and nothing is saved that
        it refuses. By default sizes and dtypes are those that `pack` (or `encode`) gives on the meta device,
        for any values. A layout whose sizes follow from values, or with parts that point into others,
        checks them itself, without trusting any: `unlike` and `forms_of` help.
        """
        return unlike(parts, forms_of(self, spec, shape, dtype))

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        """How each part is laid out along the logical dimensions, in the order of the parts of `pack`.

        Args:
            spec: the format.
            shape: the logical shape, (..., K).
            dtype: the number format of `spec`.

        Returns:
            For each part one `PartAxis` or `SHARED` per logical dimension. A part whose tuple is shorter
            cannot be cut along the dimensions that are missing.

        Raises:
            UnsupportedOp: the layout declares none, so tensors in it are not cut or joined.
        """
        raise UnsupportedOp(
            f"layout {self.name!r} cannot be cut or joined in place; call .canonical() first"
        )

    def canonical_of(self, spec: Spec, dtype: DType) -> str:
        """The canonical layout of a tensor in this layout: by default `canonical_name`, or its own name.

        A layout for several of them chooses by the format, e.g. "plain" for codes of 8 bits.
        """
        return self.canonical_name or self.name

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Parts in the layout `canonical_of` the format."""
        return parts

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Parts in this layout, from those of `canonical_of` the format."""
        return parts

    def __repr__(self) -> str:
        return f"<Layout {self.name}>"


def grid_axes(spec: Spec, shape: tuple[int, ...]) -> Geometry:
    """Geometry of a scale or zero point that has one entry per block of `spec.block`.

    Args:
        spec: the format.
        shape: of the tensor, (..., K), as `Layout.geometry` gets it.

    Returns:
        One axis per dimension of `shape`: `PartAxis(extent of a block, 1)`, or `SHARED` where one block has
        the whole dimension.
    """
    block = (1,) * (len(shape) - len(spec.block)) + spec.block[-len(shape) :]
    extents = full_block(spec.block, shape)
    return tuple(
        SHARED if declared == WHOLE else PartAxis(extent, 1)
        for declared, extent in zip(block, extents, strict=False)
    )


def make_parts(qdata: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Parts:
    """The parts "qdata", "scale" and "zero_point" of an affine format; what is None has no part.

    Args:
        qdata: the codes as the layout stores them, of any shape.
        scale: one per block, of `numerics.grid_shape`; None for formats of dense values.
        zero_point: likewise; None for formats without one.
    """
    parts = {"qdata": qdata, "scale": scale, "zero_point": zero_point}
    return {name: part for name, part in parts.items() if part is not None}


def too_wide(dtype: DType) -> str | None:
    """Why codes cannot be packed into bytes, if so."""
    if dtype.bits <= 8:
        return None
    return f"packs codes of 1 to 8 bits, and {dtype.name} has {dtype.bits}; use the layout 'plain'"
