"""What the C++ ops between numbers and codes return: shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core.ext.numerics import packed_size

#: `ZeroKind` of csrc/cpu/quantize/kernels.h that is a code
_CODE = 1


def _grid(rows: int, n: int, k: int, block_n: int, block_k: int) -> tuple[int, int, int]:
    return rows // n, -(-n // block_n), -(-k // block_k)


def _codes(x: Tensor, table: Tensor, k: int, pack: bool) -> Tensor:
    bits = (table.shape[0] - 1).bit_length() if pack else 8
    return x.new_empty((x.numel() // k, packed_size(k, bits)), dtype=torch.uint8)


def _quantize(
    x: Tensor,
    table: Tensor,
    steps: Tensor,
    order: Tensor,
    nan_code: int,
    rule: int,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
    quant_max: float,
    zero_point: int,
    scale_dtype: torch.dtype,
    mx_mode: int,
    pack: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grid: Sequence[int] = _grid(x.numel() // k, n, k, block_n, block_k)
    scale = x.new_empty(grid, dtype=scale_dtype)
    zero_dtype = scale_dtype if scale_dtype.itemsize > 1 else torch.float32
    zeros = x.new_empty(
        grid if zero_point else (0,),
        dtype=torch.uint8 if zero_point == _CODE else zero_dtype if zero_point else torch.float32,
    )
    return _codes(x, table, k, pack), scale, zeros


def _fake_quantize(
    x: Tensor,
    table: Tensor,
    steps: Tensor,
    order: Tensor,
    nan_code: int,
    rule: int,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
    quant_max: float,
    zero_point: int,
    scale_dtype: torch.dtype,
    mx_mode: int,
) -> Tensor:
    return x.new_empty((x.numel() // k, k))


def _round_scaled(
    x: Tensor,
    scale: Tensor,
    table: Tensor,
    steps: Tensor,
    order: Tensor,
    nan_code: int,
    rule: int,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
) -> Tensor:
    return x.new_empty((x.numel() // k, k))


def _block_absmax(x: Tensor, n: int, k: int, block_n: int, block_k: int) -> Tensor:
    return x.new_empty(_grid(x.numel() // k, n, k, block_n, block_k), dtype=torch.float32)


def _encode(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    steps: Tensor,
    order: Tensor,
    nan_code: int,
    rule: int,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
    pack: bool,
) -> Tensor:
    return _codes(x, table, k, pack)


def _dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
    packed: bool,
    dtype: torch.dtype,
) -> Tensor:
    bits = (table.shape[0] - 1).bit_length() if packed else 8
    return codes.new_empty((codes.numel() // packed_size(k, bits), k), dtype=dtype)


def _decode_codebooks(
    codes: Tensor,
    codebooks: Tensor,
    bits: int,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
    packed: bool,
    dtype: torch.dtype,
) -> Tensor:
    size = packed_size(k, bits if packed else 8)
    return codes.new_empty((codes.numel() // size, k), dtype=dtype)


def _error_sums(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
    packed: bool,
    dtype: torch.dtype,
    step: int,
) -> Tensor:
    return x.new_empty((2,), dtype=torch.float64)


def _quantize_rows(x: Tensor, act: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    zeros = x.new_empty((rows if act == 2 else 0, 1), dtype=torch.uint8)
    return (
        x.new_empty(x.shape, dtype=torch.uint8),
        x.new_empty((rows, 1), dtype=torch.float32),
        zeros,
    )


def _scale_sums(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    importance: Tensor | None,
    power: float | None,
    table: Tensor,
    steps: Tensor,
    order: Tensor,
    nan_code: int,
    rule: int,
) -> Tensor:
    planes = 3 if power is None else 4
    return scale.new_empty((planes, *scale.shape))


def _search_scales(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    importance: Tensor | None,
    power: float | None,
    gain: float,
    factors: Tensor,
    stages: Tensor,
    fits: int,
    point: int,
    scale_dtype: torch.dtype,
    point_dtype: torch.dtype,
    least: float,
    greatest: float,
    greatest_point: float,
    table: Tensor,
    steps: Tensor,
    order: Tensor,
    nan_code: int,
    rule: int,
) -> tuple[Tensor, Tensor, Tensor]:
    zeros = scale.new_empty((scale.shape[0] if point else 0, 1))
    return scale.new_empty(scale.shape), zeros, scale.new_empty(scale.shape, dtype=torch.bool)


def _learned_gradients(
    x: Tensor,
    grad: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    reach: float,
    table: Tensor,
    steps: Tensor,
    order: Tensor,
    nan_code: int,
    rule: int,
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(x.shape), scale.new_empty((2, x.shape[0]))


def _dequantize_tiles(
    qdata: Tensor,
    scale: Tensor,
    scale_outer: Tensor | None,
    zero_point: Tensor | None,
    offset: Tensor | None,
    offset_outer: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    bits: int,
    group: int,
    span: int,
    dtype: torch.dtype,
) -> Tensor:
    return qdata.new_empty((*qdata.shape[:-3], n, k), dtype=dtype)


def _embedding(
    ids: Tensor,
    qdata: Tensor,
    scale: Tensor,
    scale_outer: Tensor | None,
    zero_point: Tensor | None,
    offset: Tensor | None,
    offset_outer: Tensor | None,
    table: Tensor,
    n: int,
    k: int,
    bits: int,
    group: int,
    span: int,
    dtype: torch.dtype,
) -> Tensor:
    return ids.new_empty((*ids.shape, k), dtype=dtype)


FAKES: dict[str, Callable[..., Any]] = {
    "quantize": _quantize,
    "fake_quantize": _fake_quantize,
    "round_scaled": _round_scaled,
    "block_absmax": _block_absmax,
    "encode": _encode,
    "dequantize": _dequantize,
    "decode_codebooks": _decode_codebooks,
    "error_sums": _error_sums,
    "quantize_rows": _quantize_rows,
    "scale_sums": _scale_sums,
    "search_scales": _search_scales,
    "learned_gradients": _learned_gradients,
    "dequantize_tiles": _dequantize_tiles,
    "embedding": _embedding,
}
