"""Scales, zero points, and what they do: value = (decode(code) - zero) * scale.

An offset zero point is subtracted last: value = decode(code) * scale - zero.

For a format of kind "codebook" the scale of a block holds the values of all its codes, learned for the block,
and a code is an index into them: ``value = scale[code]``.

All arithmetic is in float32; wider inputs are rounded to it first. Results carry no gradient, but
`dequantize_affine` is differentiable in `scale` and in a float `zero_point`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ao_core.errors import ConfigError
from ao_core.numerics.allowed import SIGNED_SCALES, check_format, check_rule
from ao_core.numerics.blocks import block_absmax, block_absmean, block_minmax, split_blocks
from ao_core.numerics.codebooks import decode_codebooks, encode_codebooks, learn_codebooks
from ao_core.numerics.compiling import may_be_compiled
from ao_core.numerics.mx import E8M0_BIAS, choose_e8m0
from ao_core.numerics.rounding import round_to_16_bits
from ao_core.numerics.slabs import is_large, slabs
from ao_core.spec import WHOLE

if TYPE_CHECKING:
    from ao_core.records import DType

__all__ = [
    "SCALE_STORAGE",
    "choose_qparams",
    "dequantize_affine",
    "qparams_of_range",
    "quant_max_of",
    "quantize_affine",
    "scale_storage",
    "scale_to_float",
    "store_qparams",
    "store_zero",
    "zero_storage",
    "zero_to_float",
]

#: storage of a scale: torch dtype, least and greatest value that a scale may take
SCALE_STORAGE: dict[str, tuple[torch.dtype, float, float]] = {
    "float32": (torch.float32, 2.0**-126, torch.finfo(torch.float32).max),
    "bfloat16": (torch.bfloat16, 2.0**-126, torch.finfo(torch.bfloat16).max),
    "float16": (torch.float16, 2.0**-24, 65504.0),
    "e4m3": (torch.float8_e4m3fn, 2.0**-9, 448.0),
}


def choose_qparams(
    x: Tensor,
    dtype: DType,
    block: Sequence[int],
    zero_point: str = "none",
    scale_dtype: str = "float32",
    *,
    mx_mode: str = "floor",
    rule: str = "absmax",
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point from the range of every block, of shape `grid_shape(x.shape, block)`.

    The scale comes in its storage dtype. Without a zero point it is absmax / `quant_max_of(dtype, block)`;
    with one it is (max - min) / (`dtype.max` - `dtype.min`) of the range widened to hold 0, and the zero
    point is the code (uint8) of the integer that 0.0 maps to exactly ("int"), that number
    unrounded ("float": in the scale's dtype, float32 beside a scale of 8 bits), or the same times the
    scale ("offset"). A float format, finest around 0, has the center of the range there.

    A scale is finite and positive whatever finite values `x` has: 1 for a block of zeros (the least
    there is where the format has no 0), else clamped to what the storage can hold. A block with a NaN
    gets scale NaN. For "e8m0", `mx_mode` chooses the power of two (see `choose_e8m0`) without a zero point;
    with one it is the least that saturates nothing.

    With the rule "greatest" it is absmax / `dtype.max` in blocks of any size, so that the largest element is
    exact: 127 for int8 in place of 127.5, as activations in BitNet.

    With the rule "absmean" the scale is the mean magnitude of the block, whatever the format: that of
    ternary weights in BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764, section 2).

    With the rule "rank1" `x` is a matrix of elements with a scale each, so that the greater magnitude
    of its row or of its column, whichever is less, becomes `dtype.quant_max` (Li et al. 2023,
    arXiv:2309.01507, section 4.2).

    Of a format of kind "codebook" it is the values that k-means finds, in one more dimension; by the
    `importance` of each element where it is given.
    """
    check_format(dtype, zero_point, scale_dtype)
    check_rule(rule, zero_point, scale_dtype)
    x = x.detach()
    if rule == "rank1":
        return _rank1(x, dtype, block, scale_dtype), None
    if dtype.kind == "codebook":
        storage, _, greatest = SCALE_STORAGE[scale_dtype]
        tables = learn_codebooks(x, block, dtype.bits, importance)
        return _to_storage(tables.clamp(-greatest, greatest), storage), None
    if rule == "absmean":
        return _store(block_absmean(x, block), 1.0, scale_dtype, dtype.has_zero), None
    low, high = block_minmax(x, block)
    quant_max = dtype.max if rule == "greatest" else quant_max_of(dtype, block)
    return qparams_of_range(
        low, high, dtype, zero_point, scale_dtype, mx_mode=mx_mode, quant_max=quant_max
    )


def quant_max_of(dtype: DType, block: Sequence[int]) -> float:
    """The magnitude that a block's largest element is scaled to when there is no zero point.

    It is `dtype.quant_max`, except for integers in small blocks of a fixed size, where it is the largest
    value. `quant_max` is half a step beyond the largest value: all steps are finer, but the largest element
    is half a step off instead of exact. If errors are spread evenly over a step (variance 1/12), N elements
    have the squared error of N + 2 others rather than N - 1, in steps shorter by 1 part in 2 max. Exact is
    therefore better up to N = 3 max. In groups of 32 this is 0.36 dB for int8 and 0.26 dB for int6.
    """
    small = WHOLE not in block and prod(block) <= 3 * dtype.max
    return (
        dtype.max if dtype.kind == "int" and dtype.min <= -dtype.max and small else dtype.quant_max
    )


def qparams_of_range(
    low: Tensor,
    high: Tensor,
    dtype: DType,
    zero_point: str = "none",
    scale_dtype: str = "float32",
    *,
    mx_mode: str = "floor",
    quant_max: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`choose_qparams` for blocks whose elements go from `low` to `high`, grids of any shape.

    `quant_max`: that of the blocks, see `quant_max_of`; by default `dtype.quant_max`.
    """
    check_format(dtype, zero_point, scale_dtype)
    low, high = low.to(torch.float32), high.to(torch.float32)
    if zero_point == "none":
        quant_max = dtype.quant_max if quant_max is None else quant_max
        return _symmetric(torch.maximum(high, -low), dtype, scale_dtype, mx_mode, quant_max), None
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    # Half of the range, because all of it may exceed float32.
    half = high * 0.5 - low * 0.5
    steps = dtype.max - dtype.min
    if scale_dtype == "e8m0":
        scale = choose_e8m0(half, steps * 0.5, "rceil").to(torch.float8_e8m0fnu)
    else:
        scale = _store(half, steps * 0.5, scale_dtype)
    if dtype.kind == "float":  # finest around 0, where the center of the range belongs
        # not its negative: which zero is the least of a block of both would decide the sign
        point = (0.0 - (high * 0.5 + low * 0.5)) / scale_to_float(scale)
    else:
        point = dtype.min - low / scale_to_float(scale)
    return scale, store_zero(point, scale, dtype, zero_point)


def store_qparams(
    scale: Tensor, point: Tensor | None, dtype: DType, zero_point: str, scale_dtype: str
) -> tuple[Tensor, Tensor | None]:
    """Any float32 scales and zero points as they are stored: rounded, and clamped to what can be.

    Without zero points scales of `SIGNED_SCALES` may be negative, and stay so; others are positive.
    """
    if scale_dtype == "e8m0":  # a factor of sqrt(2): to the nearest power of two
        stored = choose_e8m0(scale, 2.0**0.5, "rceil").to(torch.float8_e8m0fnu)
    elif zero_point == "none" and scale_dtype in SIGNED_SCALES:
        stored = _store(scale.abs(), 1.0, scale_dtype, dtype.has_zero)
        stored = stored.copysign(scale.to(stored.dtype))
    else:
        stored = _store(scale, 1.0, scale_dtype, dtype.has_zero or zero_point != "none")
    if point is None:
        return stored, None
    return stored, store_zero(point, stored, dtype, zero_point)


def scale_storage(scale_dtype: str) -> torch.dtype:
    """The torch dtype in which a scale of one of `SCALE_DTYPES` is stored."""
    return torch.float8_e8m0fnu if scale_dtype == "e8m0" else SCALE_STORAGE[scale_dtype][0]


def zero_storage(zero_point: str, scale: torch.dtype) -> torch.dtype:
    """The torch dtype in which a zero point of this kind is stored, next to a scale in that one."""
    if zero_point == "int":
        return torch.uint8
    return scale if scale.itemsize > 1 else torch.float32


def scale_to_float(scale: Tensor) -> Tensor:
    """A scale in any storage dtype as float32, exact."""
    return scale.to(torch.float32)


def quantize_affine(
    x: Tensor,
    dtype: DType,
    block: Sequence[int],
    scale: Tensor | None,
    zero_point: Tensor | None = None,
    *,
    is_offset: bool = False,
) -> Tensor:
    """Codes (shape of `x`, in `dtype.code_dtype`) of x / scale + zero, or of x where there is no scale.

    `block`, `scale` and `zero_point` are as for `dequantize_affine`. Where the zero point `is_offset`,
    codes of (x + zero) / scale. A large tensor is taken in slabs.
    """
    x = x.detach()
    if not is_large(x):
        return _quantize_affine(x, dtype, block, scale, zero_point, is_offset)
    codes = torch.empty(x.shape, dtype=dtype.code_dtype, device=x.device)
    for part, grid in slabs(x.shape, block):
        by, point = _at(scale, grid), _at(zero_point, grid)
        codes[part] = _quantize_affine(x[part], dtype, block, by, point, is_offset)
    return codes


def _at(values: Tensor | None, grid: tuple[slice, ...]) -> Tensor | None:
    return None if values is None else values[grid]


def _quantize_affine(
    x: Tensor,
    dtype: DType,
    block: Sequence[int],
    scale: Tensor | None,
    zero_point: Tensor | None,
    is_offset: bool,
) -> Tensor:
    if scale is None:
        return dtype.encode(x)
    if dtype.kind == "codebook":
        return encode_codebooks(x, block, scale)
    x = x.to(torch.float32)
    if is_offset and zero_point is not None:
        view, by_block = split_blocks(x, block, zero_to_float(zero_point, dtype))
        x, zero_point = (view + by_block).reshape(x.shape), None
    view, by_block = split_blocks(x, block, scale_to_float(scale))
    ratio = view / by_block
    if zero_point is not None:
        _, by_block = split_blocks(x, block, zero_to_float(zero_point, dtype))
        ratio += by_block
    return dtype.encode(ratio.reshape(x.shape))


def dequantize_affine(
    codes: Tensor,
    dtype: DType,
    block: Sequence[int],
    scale: Tensor | None,
    zero_point: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    *,
    is_offset: bool = False,
) -> Tensor:
    """(decode(codes) - zero) * scale, or decode(codes), in float32, rounded once to `out_dtype`.

    `block` has the extents of a block along the last dimensions. Scale, of any dtype, and zero point have the
    shape `grid_shape(codes.shape, block)`. Where the zero point `is_offset`, it is decode(codes) *
    scale - zero. A large tensor is taken in slabs, unless a gradient is to flow through it.
    """
    learns = any(given is not None and given.requires_grad for given in (scale, zero_point))
    if learns or not is_large(codes):
        return _dequantize_affine(codes, dtype, block, scale, zero_point, out_dtype, is_offset)
    dense = torch.empty(codes.shape, dtype=out_dtype, device=codes.device)
    for part, grid in slabs(codes.shape, block):
        by, point = _at(scale, grid), _at(zero_point, grid)
        dense[part] = _dequantize_affine(codes[part], dtype, block, by, point, out_dtype, is_offset)
    return dense


def _dequantize_affine(
    codes: Tensor,
    dtype: DType,
    block: Sequence[int],
    scale: Tensor | None,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
    is_offset: bool,
) -> Tensor:
    if scale is None:
        return dtype.decode(codes).to(out_dtype)
    if dtype.kind == "codebook":
        return decode_codebooks(codes, block, scale).to(out_dtype)
    values = dtype.decode(codes)
    if zero_point is not None and not is_offset:
        view, by_block = split_blocks(values, block, zero_to_float(zero_point, dtype))
        view.sub_(by_block)
    view, by_block = split_blocks(values, block, scale_to_float(scale))
    view.mul_(by_block)
    if zero_point is not None and is_offset:
        view, by_block = split_blocks(values, block, zero_to_float(zero_point, dtype))
        view.sub_(by_block)
    return values.to(out_dtype)


def _symmetric(absmax: Tensor, dtype: DType, name: str, mx_mode: str, quant_max: float) -> Tensor:
    """Scale without a zero point, in its storage dtype."""
    if name != "e8m0":
        return _store(absmax, quant_max, name, dtype.has_zero)
    element_max = max(1.0, dtype.max) if dtype.kind == "int" else dtype.quant_max
    step = _top_step(dtype, absmax.device) if mx_mode == "even" else 0.0
    scale = choose_e8m0(absmax, element_max, mx_mode, step)
    if not dtype.has_zero:
        scale = torch.where(absmax == 0, 2.0**-E8M0_BIAS, scale)
    return scale.to(torch.float8_e8m0fnu)


def _rank1(x: Tensor, dtype: DType, block: Sequence[int], name: str) -> Tensor:
    if x.dim() != 2 or tuple(block) != (1, 1):
        raise ConfigError(
            f"scale_rule='rank1' with block={tuple(block)} on a tensor of shape {tuple(x.shape)}: each "
            "element of a matrix has a scale; use block=(1, 1) and two dimensions"
        )
    rows, columns = (block_absmax(x, of).to(torch.float32) for of in ((1, WHOLE), (WHOLE, 1)))
    # never 1 for zeros: what is done to the vectors must keep their order
    scales = (_store(found, dtype.quant_max, name, zeros=False) for found in (rows, columns))
    return torch.minimum(*scales)


def _store(magnitude: Tensor, quant_max: float, name: str, zeros: bool = True) -> Tensor:
    """Positive finite scale in its storage dtype: magnitude / quant_max, 1 where magnitude is 0.

    With `zeros` false, 0 gets the least scale, as it must where codes have no 0 to stand for it.
    """
    storage, least, greatest = SCALE_STORAGE[name]
    scale = (magnitude / quant_max).clamp(least, greatest)
    return _to_storage(torch.where(magnitude == 0, 1.0, scale) if zeros else scale, storage)


def store_zero(point: Tensor, scale: Tensor, dtype: DType, zero_point: str) -> Tensor:
    """Any float32 zero points, in the domain of codes, as they are stored next to these scales."""
    point = point.clamp(dtype.min, dtype.max)
    if zero_point == "int":
        return dtype.encode(point)
    storage = zero_storage(zero_point, scale.dtype)
    if zero_point == "offset":
        greatest = torch.finfo(storage).max
        point = (point * scale_to_float(scale)).clamp(-greatest, greatest)
    return _to_storage(point, storage)


def _to_storage(values: Tensor, storage: torch.dtype) -> Tensor:
    """Cast float32 so that codes computed from the result, compiled too, see it rounded."""
    if may_be_compiled(values) and storage in (torch.bfloat16, torch.float16):
        values = round_to_16_bits(values, storage)
    return values.to(storage)


def _top_step(dtype: DType, device: torch.device) -> Tensor:
    """Distance from the greatest value of a format to the next one below."""
    values = dtype.decode(torch.arange(1 << dtype.bits, dtype=torch.uint8, device=device))
    return dtype.max - torch.where(values < dtype.max, values, dtype.min).amax()


def zero_to_float(zero_point: Tensor, dtype: DType) -> Tensor:
    """A zero point, a code of `dtype` or a number, as float32, exact."""
    return (
        dtype.decode(zero_point)
        if zero_point.dtype == torch.uint8
        else zero_point.to(torch.float32)
    )
