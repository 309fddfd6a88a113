"""Kernels between dense values and codes, for the canonical layouts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import Call, DType, Kernel, QTensor, Spec
from ao_core.ext import Parts, numerics, quantize_values, registry
from ao_core.ext.kernels import (
    decode_reference,
    encode_reference,
    fake_quantize_reference,
    has_foreign_zeros,
    quantize_scaled_reference,
    scale_values,
)
from ao_core.ext.numerics import (
    MX_MODES,
    full_block,
    grid_shape,
    may_be_compiled,
    pack_unit,
    packed_size,
    qparams_of_range,
    quant_max_of,
)
from ao_kernels.cpu.formats import Format, format_of
from ao_kernels.cpu.library import unavailable

__all__ = [
    "CODE_KERNELS",
    "ELEMENTS",
    "Matrix",
    "known",
    "matrix_of",
    "reach",
    "refuses_codes",
    "zero_kind",
]

#: dense tensors that the C++ code reads and writes
ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}
#: what makes 0 of elements that are divided by it, and of 0 when it is multiplied by it
_GREAT = 2.0**126
#: the range of every piece of a row that a block of several rows has is kept for a while
_FEWEST_COLUMNS = 8


class Matrix(NamedTuple):
    """A tensor seen as matrices of n x k elements in blocks of block_n x block_k."""

    n: int
    k: int
    block_n: int
    block_k: int


def matrix_of(spec: Spec, shape: tuple[int, ...], dtype: DType) -> Matrix | None:
    """The matrices that a tensor consists of, or None where its blocks are no parts of matrices."""
    sizes = list(registry.layouts.get(spec.layout).blocked_shape(shape))
    extents = list(full_block(spec.block, sizes))
    k, block_k = sizes.pop(), extents.pop()
    # codes of rows without padding follow one another as those of one row
    joined = _code_bits(spec, dtype) == 8 or k % pack_unit(dtype.bits)[0] == 0
    while sizes and block_k == k and extents[-1] == sizes[-1] and (joined or sizes[-1] == 1):
        size = sizes.pop()
        extents.pop()
        k, block_k = k * size, block_k * size
    n = block_n = 1
    while sizes and extents[-1] == sizes[-1]:
        n = block_n = n * sizes.pop()
        extents.pop()
    if sizes:
        n, block_n = n * sizes.pop(), block_n * extents.pop()
    return Matrix(n, k, block_n, block_k) if all(extent == 1 for extent in extents) else None


def quantize(x: Tensor, spec: Spec) -> Parts:
    """The parts of `x`, bit for bit those of `encode_reference`."""
    if may_be_compiled(x):
        return encode_reference(x, spec)
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    shape = layout.blocked_shape(tuple(x.shape))
    matrix, fmt = known(spec, tuple(x.shape), dtype)
    packs = _code_bits(spec, dtype) < 8
    zero_point = None
    grid = grid_shape(shape, spec.block)
    if isinstance(spec.scale_dtype, Spec):
        scale: Tensor = _nested_scale(x, spec, dtype, matrix, grid)
        by = scale_values(scale)
        by = torch.where(by == 0, torch.inf, by)  # rounded to 0: its elements are 0, not 0 / 0
        codes = torch.ops.ao_kernels.encode(x, by, None, *fmt, *matrix, packs)
    else:
        codes, scale, zeros = torch.ops.ao_kernels.quantize(
            x, *fmt, *matrix, *_choice(spec, dtype), packs
        )
        scale = scale.view(grid)
        zero_point = zeros.view(grid) if spec.zero_point != "none" else None
    return _as_parts(codes, scale, zero_point, spec, dtype, shape)


def fake_quantize(x: Tensor, spec: Spec) -> Tensor:
    """`x` as the format rounds it, in one pass, bit for bit what `dequantize` gives for its parts."""
    if may_be_compiled(x):
        return fake_quantize_reference(x, spec)
    dtype = registry.dtypes.get(spec.dtype)
    matrix, fmt = known(spec, tuple(x.shape), dtype)
    if isinstance(spec.scale_dtype, Spec):
        scale = scale_values(_nested_scale(x, spec, dtype, matrix, grid_shape(x.shape, spec.block)))
        by = torch.where(scale == 0, _GREAT, scale)  # rounded to 0: its elements are 0
        y: Tensor = torch.ops.ao_kernels.round_scaled(x, by, *fmt, *matrix)
    else:
        flipped = _flipped(x, matrix) if _rounds_columns(spec, x.dtype) else None
        rows, seen = (x, matrix) if flipped is None else (x.t(), flipped)
        y = torch.ops.ao_kernels.fake_quantize(rows, *fmt, *seen, *_choice(spec, dtype))
        if flipped is not None:
            return y.view(rows.shape).t()
    return y.view(x.shape)


def _flipped(x: Tensor, matrix: Matrix) -> Matrix | None:
    """The matrix of `x.t()`, if that is what lies in memory row by row, as the operands of gradients do."""
    if x.dim() != 2 or x.is_contiguous() or not x.t().is_contiguous():
        return None
    if matrix.block_k == x.numel():
        return matrix
    fits = matrix.block_n == 1 and (matrix.n, matrix.k) == tuple(x.shape)
    return Matrix(matrix.k, matrix.n, matrix.block_k, 1) if fits else None


def _rounds_columns(spec: Spec, dtype: torch.dtype) -> bool:
    """Whether `fake_quantize` knows blocks of one column."""
    return spec.zero_point == "none" and dtype != torch.float16


def _choice(spec: Spec, dtype: DType) -> tuple[float, int, torch.dtype, int]:
    """How scales are chosen, as the ops are told."""
    assert isinstance(spec.scale_dtype, str)  # a kernel has accepted it
    mode = MX_MODES.index(spec.option("mx_mode", "floor"))
    return reach(spec, dtype), zero_kind(spec, dtype), _SCALES[spec.scale_dtype], mode


def quantize_scaled(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: Spec) -> Parts:
    """The parts of `x` by a scale and a zero point, bit for bit those of `quantize_affine`."""
    if may_be_compiled(x):
        return quantize_scaled_reference(x, scale, zero_point, spec)
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    shape = tuple(x.shape)
    matrix, fmt = known(spec, shape, dtype)
    point = None if zero_point is None else numerics.zero_to_float(zero_point, dtype)
    by, packs = numerics.scale_to_float(scale), _code_bits(spec, dtype) < 8
    codes = torch.ops.ao_kernels.encode(x, by, point, *fmt, *matrix, packs)
    return _as_parts(codes, scale, zero_point, spec, dtype, layout.blocked_shape(shape))


def dequantize(parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Dense values of `shape`, bit for bit those of `decode_reference`."""
    fmt = registry.dtypes.get(spec.dtype)
    if may_be_compiled(parts["qdata"]) or has_foreign_zeros(parts, spec, fmt):
        return decode_reference(parts, spec, shape, dtype)
    if fmt.kind == "codebook":
        matrix, packed = _matrix_of(spec, shape, fmt), _code_bits(spec, fmt) < 8
        where = (fmt.bits, *matrix, packed, dtype)
        codes = parts["qdata"].view(torch.uint8)
        values: Tensor = torch.ops.ao_kernels.decode_codebooks(codes, parts["scale"], *where)
        return values.view(shape)
    dense: Tensor = torch.ops.ao_kernels.dequantize(*_coded(parts, spec, shape), dtype)
    return dense.view(shape)


def error_sums(x: Tensor, w: QTensor, step: int) -> Tensor:
    """Sums of x² and of (x - w)² over every `step`-th row, in float64."""
    if has_foreign_zeros(w.parts, w.spec, w.format):
        return numerics.error_sums(x.detach()[::step], w.dequantize()[::step])
    coded = _coded(w.parts, w.spec, w.stored_shape)
    sums: Tensor = torch.ops.ao_kernels.error_sums(x.detach(), *coded, w.dtype, step)
    return sums


def _coded(
    parts: Parts, spec: Spec, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int, int, int, int, bool]:
    """What the ops that decode are told of parts."""
    dtype = registry.dtypes.get(spec.dtype)
    matrix, fmt = known(spec, shape, dtype)
    scale = scale_values(parts["scale"]) if isinstance(spec.scale_dtype, Spec) else parts["scale"]
    packed = _code_bits(spec, dtype) < 8
    codes = parts["qdata"].view(torch.uint8)
    return codes, scale, parts.get("zero_point"), fmt.table, *matrix, packed


def _nested_scale(
    x: Tensor, spec: Spec, dtype: DType, matrix: Matrix, grid: tuple[int, ...]
) -> QTensor:
    """Scales that are quantized themselves: as `encode_reference`, from the magnitudes of the blocks."""
    assert isinstance(spec.scale_dtype, Spec)
    greatest = torch.ops.ao_kernels.block_absmax(x, *matrix).view(grid)
    quant_max = quant_max_of(dtype, spec.block)
    scale, _ = qparams_of_range(-greatest, greatest, dtype, quant_max=quant_max)
    # a block of zeros takes the least of the scales
    zeros = greatest == 0
    least = torch.where(zeros, torch.inf, scale).amin().nan_to_num(posinf=1.0)
    return quantize_values(torch.where(zeros, least, scale), spec.scale_dtype)


def known(spec: Spec, shape: tuple[int, ...], dtype: DType) -> tuple[Matrix, Format]:
    """The matrices and the format of a call that `refuses_codes` has accepted."""
    fmt = format_of(dtype)
    assert isinstance(fmt, Format)  # the kernel has accepted the call
    return _matrix_of(spec, shape, dtype), fmt


def _matrix_of(spec: Spec, shape: tuple[int, ...], dtype: DType) -> Matrix:
    matrix = matrix_of(spec, shape, dtype)
    assert matrix is not None  # the kernel has accepted the call
    return matrix


def _code_bits(spec: Spec, dtype: DType) -> int:
    return 8 if spec.layout == "plain" else dtype.bits


def _as_parts(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    spec: Spec,
    dtype: DType,
    shape: tuple[int, ...],
) -> Parts:
    """Parts of the blocked shape from rows of codes, packed or one byte each."""
    qdata = codes.view(*shape[:-1], packed_size(shape[-1], _code_bits(spec, dtype)))
    if spec.layout == "plain":
        qdata = qdata.view(dtype.storage)
    parts = {"qdata": qdata, "scale": scale}
    return parts if zero_point is None else {**parts, "zero_point": zero_point}


def reach(spec: Spec, dtype: DType) -> float:
    """What the magnitude of a block is divided by: as `choose_qparams`."""
    if spec.zero_point != "none":
        return (dtype.max - dtype.min) * 0.5
    if spec.scale_dtype == "e8m0" and dtype.kind == "int":
        return max(1.0, dtype.max)
    return quant_max_of(dtype, spec.block)


def zero_kind(spec: Spec, dtype: DType) -> int:
    """`ZeroKind` of csrc/cpu/quantize/kernels.h."""
    if spec.zero_point == "float":
        return 3 if dtype.kind == "float" else 2
    return ("none", "int").index(spec.zero_point)


def refuses_codes(call: Call, *, columns: bool = False, codebooks: bool = False) -> str | None:
    """What all ops between dense values and codes need; None, or a sentence that says what is missing.

    With `columns`, blocks may be parts of single columns; with `codebooks`, values may be learned.
    """
    if call.x_dtype not in ELEMENTS:
        return f"reads and writes float32, bfloat16 and float16, not {call.x_dtype}"
    if 0 in call.weight_shape:
        return "needs a tensor that is not empty"
    if call.spec.zero_point == "offset":
        return "takes zero points off before scaling, and this format has offsets"
    dtype = registry.dtypes.get(call.spec.dtype)
    if dtype.kind == "codebook" and not codebooks:
        return f"knows the values of each code beforehand, and those of {dtype.name} are learned"
    matrix = matrix_of(call.spec, call.weight_shape, dtype)
    narrow = matrix is not None and matrix.block_n > 1 and matrix.block_k < _FEWEST_COLUMNS
    if matrix is None or (narrow and not (columns and matrix.block_k == 1)):
        return f"needs blocks that lie in a row or in a few of a matrix, found {call.spec.block}"
    reason = unavailable()  # the library is asked how it encodes
    if reason is not None or dtype.kind == "codebook":
        return reason
    fmt = format_of(dtype)
    return fmt if isinstance(fmt, str) else None


def _refuses_dequantize(call: Call) -> str | None:
    return refuses_codes(call, codebooks=True)


def _refuses_quantize(call: Call, *, columns: bool = False) -> str | None:
    if isinstance(call.spec.scale_dtype, Spec) and call.spec.zero_point != "none":
        return "has no zero points beside scales that are quantized themselves"
    if registry.dtypes.get(call.spec.dtype).min > 0:
        return "gives blocks of zeros the scale 1, which needs a format that has 0"
    return refuses_codes(call, columns=columns)


def _refuses_fake_quantize(call: Call) -> str | None:
    if call.spec.is_static or call.spec.option("scale_rule", "absmax") != "absmax":
        return f"follows the largest magnitude, found {call.spec}"
    plain = isinstance(call.spec.scale_dtype, str)
    return _refuses_quantize(call, columns=plain and _rounds_columns(call.spec, call.x_dtype))


CODE_KERNELS = (
    *(
        Kernel(f"cpu_{op}_{layout}", op, layout, "cpu", fn, 50, unavailable, refuses)
        for op, fn, refuses in (
            ("quantize", quantize, _refuses_quantize),
            ("quantize_scaled", quantize_scaled, refuses_codes),
            ("dequantize", dequantize, _refuses_dequantize),
            ("error_sums", error_sums, refuses_codes),
        )
        for layout in ("plain", "packed", "flat")
    ),
    # the layout does not matter, and callers name the plain one
    Kernel(
        "cpu_fake_quantize",
        "fake_quantize",
        "plain",
        "cpu",
        fake_quantize,
        50,
        unavailable,
        _refuses_fake_quantize,
    ),
)
