"""Weights as floats of 8 or 4 bits with one scale per block: FP8, MXFP8, MXFP4, NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import TENSOR, CheckpointError, QuantizationError
from ao_quant.interchange.integers import SCALES, rows_of

__all__ = ["FP8", "NVFP4_SCALE", "block_of", "fp4", "fp8", "is_fp8", "kind_of", "nvfp4", "rounded"]

FP8 = "f8e4m3"
#: one number for all scales of a block
NVFP4_SCALE = Spec(FP8, TENSOR, "float32")
_MX = {8: Spec(FP8, (1, 32), "e8m0"), 4: Spec("f4e2m1", (1, 32), "e8m0", layout="packed")}
_NVFP4 = Spec("f4e2m1", (1, 16), NVFP4_SCALE, layout="packed")
_NAMES = {dtype: name for name, dtype in SCALES.items()}


def block_of(
    shape: tuple[int, ...], scale: tuple[int, ...], size: object = None
) -> tuple[int, int]:
    """The block of one scale of a matrix, from the number of scales; `size`: as the label has it.

    Raises:
        CheckpointError: there are blocks of no one size.
    """
    n, k = shape
    if scale in ((), (1,), (1, 1)):
        return TENSOR if n > 1 else (1, WHOLE)
    if scale in ((n,), (n, 1)):
        return (1, WHOLE)
    if len(scale) == 2:
        given = [tuple(size)] if isinstance(size, (list, tuple)) and len(size) == 2 else []
        even = [(1, k // scale[1])] if scale[0] == n and k % scale[1] == 0 else []
        for rows, columns in (*given, *even, (128, 128)):
            sizes = type(rows) is int and type(columns) is int and rows > 0 and columns > 0
            if sizes and scale == (-(-n // rows), -(-k // columns)):
                return rows, columns
    raise CheckpointError(f"scales {list(scale)} are of no blocks of a weight {[n, k]}")


def fp8(codes: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> QTensor:
    """Float8 of (N, K), float8_e4m3fn or its bytes; a scale of uint8 is an exponent plus 127."""
    n, k = codes.shape
    grid = tuple(1 if b == WHOLE else -(-s // b) for s, b in zip((n, k), block, strict=True))
    if scale.numel() != grid[0] * grid[1]:
        raise CheckpointError(f"scales {list(scale.shape)} for {list(grid)} blocks of {[n, k]}")
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    name = "e8m0" if scale.dtype == torch.float8_e8m0fnu else _NAMES[scale.dtype]
    parts = {"qdata": codes.view(torch.float8_e4m3fn), "scale": scale.reshape(grid)}
    return QTensor(parts, Spec(FP8, block, name), (n, k), dtype)


def fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> QTensor:
    """MXFP4: bytes (..., N, K / 2) with the even element in the low half, exponents (..., N, K / 32)."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if tuple(scale.shape) != (*shape[:-1], -(-shape[-1] // 32)):
        raise CheckpointError(f"scales {list(scale.shape)} for blocks of 32 of {list(shape)}")
    parts = {"qdata": packed, "scale": scale.view(torch.float8_e8m0fnu)}
    return QTensor(parts, _MX[4], shape, dtype)


def nvfp4(packed: Tensor, scale: Tensor, shared: Tensor, dtype: torch.dtype) -> QTensor:
    """NVFP4: bytes (N, K / 2), scales e4m3 (N, K / 16) and the number that all of them are multiplied by."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    if tuple(scale.shape) != (n, -(-k // 16)) or shared.numel() != 1:
        raise CheckpointError(f"scales {list(scale.shape)} for blocks of 16 of {[n, k]}")
    inner = {"qdata": scale.view(torch.float8_e4m3fn), "scale": shared.float().reshape(1, 1)}
    nested = QTensor(inner, NVFP4_SCALE, tuple(scale.shape), torch.float32)
    return QTensor({"qdata": packed, "scale": nested}, _NVFP4, (n, k), dtype)


def is_fp8(tensor: QTensor) -> bool:
    """Whether it is a matrix of float8 with scales that are numbers."""
    spec = tensor.canonical().spec
    plain = spec.dtype == FP8 and spec.layout == "plain" and spec.zero_point == "none"
    return plain and not spec.input and spec.scale_dtype in SCALES and tensor.dim() == 2


def kind_of(tensor: QTensor) -> str:
    """The kind of a tensor, "fp8", "mxfp8", "mxfp4" or "nvfp4"; empty: it is none of them."""
    spec = tensor.canonical().spec
    if spec.input or spec.zero_point != "none":
        return ""
    kind = (spec.dtype, spec.block, spec.scale_dtype, spec.layout)
    for name, like in (("mxfp8", _MX[8]), ("mxfp4", _MX[4]), ("nvfp4", _NVFP4)):
        if kind == (like.dtype, like.block, like.scale_dtype, like.layout):
            return name
    return "fp8" if is_fp8(tensor) else ""


def rounded(tensor: QTensor, kind: str, block: tuple[int, int] | None = None) -> QTensor:
    """The tensor itself if it is of the kind, else its values in that format.

    Args:
        tensor: a matrix; of "mxfp4", any number of them.
        kind: "fp8", "mxfp8", "mxfp4" or "nvfp4".
        block: the block of a scale of "fp8", which a tensor must have to be kept; None: any.

    Raises:
        QuantizationError: it is of another shape.
    """
    base = rows_of(tensor)
    if base.dim() != 2 and kind != "mxfp4":
        raise QuantizationError(f"{tuple(base.shape)} is no matrix, and others are not stored so")
    fits = block is None or base.spec.block == block
    if kind_of(base) == kind and fits:
        return base
    if kind == "nvfp4":
        return quantize_tensor(base.dequantize(torch.float32), _NVFP4)
    spec = Spec(FP8, block or (1, WHOLE)) if kind == "fp8" else _MX[8 if kind == "mxfp8" else 4]
    return quantize_tensor(base.dequantize(torch.float32), spec)
