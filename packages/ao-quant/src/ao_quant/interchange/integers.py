"""Weights as integers with one scale and one zero point a group: what most formats of other projects are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import PERMUTE, CheckpointError, Parts, QuantizationError, registry
from ao_core.ext.kernels import unpack_parts
from ao_quant.interchange.words import flip_sign, flip_sign_

__all__ = [
    "Integers",
    "Offsets",
    "assemble",
    "integers_of",
    "integers_on",
    "offsets_of",
    "rows_of",
    "tensor_of",
]

#: name of the storage of a scale -> dtype
SCALES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in SCALES.items()}
#: columns that share a scale where a weight has no groups that a format could keep, the first that fits
_GROUPS = (128, 64, 32)


class Integers(NamedTuple):
    """W[n, k] = scale[n, g] · (codes[n, k] - zero[n, g]), where g = k // group."""

    #: uint8 (N, K), each below 2**bits
    codes: Tensor
    bits: int
    #: columns of a group; the last group may have fewer
    group: int
    #: (N, G), as it is stored
    scale: Tensor
    #: int16 (N, G); None: 2**(bits - 1) everywhere
    zero: Tensor | None = None
    #: int (K,): the column of W that column k of the codes belongs to; None: k
    perm: Tensor | None = None

    @property
    def zeros(self) -> Tensor:
        """int16 (N, G), whether symmetric or not."""
        middle = torch.full(self.scale.shape, 1 << (self.bits - 1), dtype=torch.int16)
        return middle if self.zero is None else self.zero


def assemble(
    codes: Tensor,
    spec: Spec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scale: Tensor | None,
    zero: Tensor | None = None,
    **beside: Tensor,
) -> QTensor:
    """A tensor from codes, as its layout packs them; `beside`: parts that are not of the layout."""
    layout, numbers = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    parts: Parts = layout.pack(codes, scale, zero, spec, numbers)
    return QTensor({**parts, **beside}, spec, shape, dtype)


def _in_range(found: Integers) -> Integers:
    """Zero points that are codes: with more bits, and codes moved up, where they are not.

    Kernels take zero points for codes. A zero point of 16 with 4 bits, which version 1 of GPTQ stores as 15,
    or one of -3 would be another number to them.

    Raises:
        CheckpointError: 8 bits do not hold them.
    """
    if found.zero is None or not found.zero.numel():
        return found
    low, high = (int(each) for each in torch.aminmax(found.zero))
    if low >= 0 and high < 1 << found.bits:
        return found
    up = max(-low, 0)
    bits = max(high + up, (1 << found.bits) - 1 + up).bit_length()
    if bits > 8:
        raise CheckpointError(
            f"zero points from {low} to {high} with {found.bits}-bit codes need {bits} bits, and 8 are held"
        )
    return found._replace(codes=found.codes + up, bits=bits, zero=found.zero + up)


def tensor_of(found: Integers, dtype: torch.dtype, *, own: bool = False) -> QTensor:
    """The tensor with these values: around 0 where all zero points are in the middle.

    Args:
        found: the values.
        dtype: of the tensor.
        own: nothing else has the memory of the codes, which may be changed.

    Raises:
        CheckpointError: zero points are too far from the codes.
    """
    found = _in_range(found)
    codes, bits = found.codes, found.bits
    middle = 1 << (bits - 1)
    symmetric = bits > 1 and (found.zero is None or bool((found.zero == middle).all()))
    columns = codes.shape[-1]
    block = (1, WHOLE if found.group >= columns and found.scale.shape[-1] == 1 else found.group)
    spec = Spec(
        f"int{bits}" if symmetric else f"uint{bits}",
        block,
        _NAMES[found.scale.dtype],
        "none" if symmetric else "int",
        "plain" if bits == 8 else "packed",
        input=() if found.perm is None else (PERMUTE,),
    )
    if symmetric:
        codes = flip_sign_(codes, bits) if own else flip_sign(codes, bits)
    perm = {} if found.perm is None else {"in_perm": found.perm.to(torch.int32).reshape(1, -1)}
    return assemble(
        codes,
        spec,
        tuple(codes.shape),
        dtype,
        found.scale.contiguous(),
        None if symmetric else found.zeros.to(torch.uint8).contiguous(),
        **perm,
    )


def rows_of(tensor: QTensor) -> QTensor:
    """The canonical tensor whose stored shape is the logical one.

    Raises:
        QuantizationError: it is a transposed or flattened view.
    """
    if tensor.is_permuted:
        raise QuantizationError(f"{tensor!r} is a view of what is stored; use the stored tensor")
    return tensor.canonical()


def integers_of(tensor: QTensor) -> Integers | None:
    """The integers that a matrix is made of; None: it is of another kind."""
    base = rows_of(tensor)
    spec, numbers = base.spec, base.format
    steps = [step.kind for step in spec.input]
    grid = len(spec.block) == 2 and spec.block[0] == 1 and base.dim() == 2
    plain = base.layout_record.affine and base.layout_record.blocked_shape(base.shape) == base.shape
    if numbers.kind != "int" or not (grid and plain):
        return None
    if steps not in ([], ["permute"]) or not isinstance(base.parts.get("scale"), Tensor):
        return None
    if isinstance(base.scale, QTensor) or base.scale.dtype not in _NAMES:
        return None
    stored = replace(spec, input=())
    parts = {
        n: p for n, p in base.parts.items() if n not in ("in_perm", "act_scale", "act_zero_point")
    }
    codes, _, zero = unpack_parts(parts, stored, tuple(base.shape))
    signed = spec.dtype.startswith("int")
    if zero is not None and spec.zero_point != "int":
        zero = _whole_zeros(zero, base.scale if spec.zero_point == "offset" else None)
    if (spec.zero_point != "none" and zero is None) or (signed and zero is not None):
        return None
    if signed:
        memory = {leaf.untyped_storage().data_ptr() for _, leaf in base.leaves()}
        own = codes.untyped_storage().data_ptr() not in memory
        codes = codes if own else codes.clone()
        codes.bitwise_and_((1 << numbers.bits) - 1)
        flip_sign_(codes, numbers.bits)
    elif zero is None:
        zero = torch.zeros(base.scale.shape, dtype=torch.uint8)
    columns = base.shape[-1]
    group = columns if spec.block[1] == WHOLE else min(spec.block[1], columns)
    zero = None if zero is None else zero.to(torch.int16)
    perm = base.parts["in_perm"].reshape(-1).long() if steps else None
    return Integers(codes, numbers.bits, max(group, 1), base.scale, zero, perm)


class Offsets(NamedTuple):
    """W[n, k] = scale[n, g] · codes[n, k] - offset[n, g], where g = k // group."""

    #: uint8 (N, K)
    codes: Tensor
    bits: int
    #: columns of a group
    group: int
    #: (N, G), as it is stored
    scale: Tensor
    #: float32 (N, G): products of scales and zero points that are not rounded yet
    offset: Tensor


def offsets_of(tensor: QTensor) -> Offsets | None:
    """The unsigned codes of a matrix and what is taken off; None: it is of another kind."""
    base = rows_of(tensor)
    spec = base.spec
    grid = len(spec.block) == 2 and spec.block[0] == 1 and base.dim() == 2
    if not spec.dtype.startswith("uint") or not grid or spec.input or spec.zero_point == "none":
        return None
    if not isinstance(scale := base.parts.get("scale"), Tensor) or isinstance(scale, QTensor):
        return None
    if not base.layout_record.affine or scale.dtype not in _NAMES:
        return None
    codes, wide, zero = unpack_parts(base.parts, spec, tuple(base.shape))
    if codes.shape != base.shape or zero is None or wide is None:
        return None
    offset = zero.float() if spec.zero_point == "offset" else zero.float() * wide.float()
    group = base.shape[1] if spec.block[1] == WHOLE else spec.block[1]
    return Offsets(codes, base.format.bits, group, scale, offset)


def _whole_zeros(zero: Tensor, scale: Tensor | None) -> Tensor | None:
    """Zero points, or offsets beside their scales, that are exactly codes; None: they are not."""
    wide = zero.float() if scale is None else zero.float() / scale.float()
    whole = wide.round()
    exact = whole == wide if scale is None else whole * scale.float() == zero.float()
    in_range = bool(exact.all()) and bool(((whole >= 0) & (whole <= 255)).all())
    return whole.to(torch.int16) if in_range else None


def integers_on(
    tensor: QTensor,
    bits: tuple[int, ...],
    *,
    scale: tuple[torch.dtype, ...] = (torch.float16,),
    permuted: bool = False,
    whole: bool = True,
    groups: tuple[int, ...] = (),
    symmetric: bool = False,
) -> Integers:
    """The integers of a matrix if a format has them, else integers that are near its values.

    Args:
        tensor: any matrix.
        bits: that the format has; codes of fewer bits fit into more.
        scale: the dtypes that its scales may have; others become the first one.
        permuted: whether its groups may be those of permuted columns.
        whole: whether one scale for a whole row is a group.
        groups: the sizes of groups that it has; empty: any.
        symmetric: whether it has no zero points.

    Raises:
        QuantizationError: the tensor is no matrix.
    """
    if tensor.dim() != 2:
        raise QuantizationError(f"{tuple(tensor.shape)} is no matrix, and others are not stored so")
    found = integers_of(tensor)
    width = found.bits if found else tensor.format.bits
    wide = min((b for b in bits if b >= width), default=max(bits))
    if found is not None and found.bits <= wide and _fits(found, permuted, whole, groups):
        stored = found.scale if found.scale.dtype in scale else found.scale.to(scale[0])
        widened = found if found.bits == wide else found._replace(zero=found.zeros, bits=wide)
        sound = bool(stored.isfinite().all()) and not bool(
            ((stored == 0) & (found.scale != 0)).any()
        )
        if widened.zero is not None and bool((widened.zero == 1 << (wide - 1)).all()):
            widened = widened._replace(zero=None)
        in_range = widened.zero is None or (
            not symmetric and int(widened.zero.min()) >= 0 and int(widened.zero.max()) < 1 << wide
        )
        if sound and in_range:
            return widened._replace(scale=stored)
    return _rounded(tensor, wide, scale, whole, groups, symmetric)


def _fits(found: Integers, permuted: bool, whole: bool, groups: tuple[int, ...]) -> bool:
    columns = found.codes.shape[-1]
    is_whole = found.group >= columns
    size = (is_whole and whole) or not groups or found.group in groups
    return (
        size
        and (whole or not is_whole or found.group in groups)
        and (permuted or found.perm is None)
    )


def _rounded(
    tensor: QTensor,
    bits: int,
    scale: tuple[torch.dtype, ...],
    whole: bool,
    groups: tuple[int, ...],
    symmetric: bool,
) -> Integers:
    """The nearest integers to the values."""
    columns = tensor.shape[-1]
    block = tensor.spec.block[-1]
    wanted = [g for g in (block, *_GROUPS, *groups) if g > 0 and columns % g == 0]
    size = next((g for g in wanted if not groups or g in groups), None)
    if size is None and not whole:
        raise QuantizationError(
            f"rows of {columns} elements are in no whole groups of {groups or _GROUPS}"
        )
    storage = next(
        (s for s in scale if s == getattr(tensor.parts.get("scale"), "dtype", None)), scale[0]
    )
    signed = symmetric and bits > 1
    spec = Spec(
        f"int{bits}" if signed else f"uint{bits}",
        (1, size or WHOLE),
        _NAMES[storage],
        "none" if signed else "int",
        "plain" if bits == 8 else "packed",
    )
    near = integers_of(quantize_tensor(tensor.dequantize(torch.float32), spec))
    assert near is not None
    return near
