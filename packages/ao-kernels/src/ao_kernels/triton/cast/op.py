"""Casts of matrices to float8, as they are and transposed: what matmuls in float8 training read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core.ext import ConfigError, UnsupportedOp
from ao_kernels.triton.cast.records import STORAGE
from ao_kernels.triton.shared.device import on_device
from ao_kernels.triton.shared.dtypes import INPUTS
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.ptx import divide, pack_float8, refine

__all__ = ["SCALES", "TILES", "WARPS", "cast_dual", "cast_plain", "settings"]

#: which numbers share a scale; of "given" there is one, which somebody knows
SCALES = ("given", "tensor", "row", "block")
#: tiles of 128 × 128 per CTA, and its warps
TILES, WARPS = 4, 8


def settings(numbers: str, scales: str, *, transposed: bool, assembly: bool) -> dict[str, Any]:
    """The compile-time arguments of the kernel `cast`."""
    import triton.language as tl

    wide = numbers == "f8e4m3"
    return {
        "TILES": TILES,
        "SCALES": scales,
        "FORMAT": tl.float8e4nv if wide else tl.float8e5,
        "MBITS": 3 if wide else 2,
        "QMAX": torch.finfo(STORAGE[numbers]).max,
        "TRANSPOSED": transposed,
        "DIVIDE": divide() if assembly else None,
        "SATURATE": divide(saturating=True) if assembly else None,
        "REFINE": refine() if assembly else None,
        "PACK": pack_float8(numbers[2:]) if assembly else None,
    }


def _cast_dual(
    x: Tensor, numbers: str, scales: str, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix x (M, N) and its transpose in float8, read once where scales allow.

    Args:
        x: bfloat16, float16 or float32, finite or not.
        numbers: "f8e4m3" or "f8e5m2".
        scales: "given", `scale` is that of all; "tensor", the largest magnitude chooses one; "row", one for
            each row of x, and of its transpose; "block", for 128 numbers in a row of either.
        scale: float32 with one positive element, on the device of x; for "given" alone.

    Returns:
        codes (M, N) and their float32 scales, codes (N, M) and theirs. The rows of the second codes begin at
        multiples of 16 bytes. Scales of "given" and "tensor" are (1, 1), of "row" (M, 1) and (N, 1), of
        "block" (M, ceil(N / 128)) and (N, ceil(M / 128)). Each pair has the bits of the parts that the
        reference gives for x and for its transpose, but that a NaN has no sign, and that codes may differ
        by one step where a scale is below 2**-86 or a row holds infinities.
    """
    _check(x, numbers, scales, scale)
    codes, by, codes_t, by_t = _outputs(x, scales)
    launch(x, numbers, scales, scale, codes, by, codes_t, by_t)
    return _as(codes, numbers), by, _as(codes_t, numbers)[:, : x.shape[0]], by_t


def _fake_dual(
    x: Tensor, numbers: str, scales: str, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, by, codes_t, by_t = _outputs(x, scales)
    return _as(codes, numbers), by, _as(codes_t, numbers)[:, : x.shape[0]], by_t


def _cast_plain(x: Tensor, numbers: str, scales: str) -> tuple[Tensor, Tensor]:
    """The first half of `cast_dual`."""
    _check(x, numbers, scales, None)
    codes, by = _output(x, x.shape, scales)
    launch(x, numbers, scales, None, codes, by, None, None)
    return _as(codes, numbers), by


def _fake_plain(x: Tensor, numbers: str, scales: str) -> tuple[Tensor, Tensor]:
    codes, by = _output(x, x.shape, scales)
    return _as(codes, numbers), by


def _output(x: Tensor, shape: Sequence[int], scales: str) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and scales."""
    rows, columns = shape
    grid = {"row": (rows, 1), "block": (rows, -(-columns // 128))}.get(scales, (1, 1))
    return (
        x.new_empty((rows, columns), dtype=torch.uint8),
        x.new_empty(grid, dtype=torch.float32),
    )


def _outputs(x: Tensor, scales: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = x.shape
    _, by_t = _output(x, (n, m), scales)
    codes_t, _ = _output(x, (n, -(-m // 16) * 16), scales)
    return *_output(x, (m, n), scales), codes_t, by_t


def _as(codes: Tensor, numbers: str) -> Tensor:
    return codes.view(STORAGE[numbers])


def launch(
    x: Tensor,
    numbers: str,
    scales: str,
    scale: Tensor | None,
    codes: Tensor,
    by: Tensor,
    codes_t: Tensor | None,
    by_t: Tensor | None,
) -> None:
    """Fill the outputs; without the last two only the first half."""
    from ao_kernels.triton.cast import kernel

    x = x.contiguous()
    m, n = x.shape
    grid = (-(-m // (128 * TILES)), -(-n // 128))
    found = found_t = by if scale is None else scale
    with on_device(x):
        if scales in ("tensor", "row"):
            sizes = (1, 0) if scales == "tensor" else (m, n)
            found, found_t = x.new_zeros(sum(sizes), dtype=torch.float32).split(sizes)
            as_bits = (each.view(torch.int32) for each in (found, found_t))
            kernel.amax[grid](
                x, *as_bits, m, n, 2 * TILES, scales, codes_t is not None, num_warps=WARPS
            )
        kernel.cast[grid](
            x, found, found_t, _as(codes, numbers), by,
            codes if codes_t is None else codes_t.view(torch.int32), by if by_t is None else by_t,
            m, n, 0 if codes_t is None else codes_t.shape[1] // 4,
            by.shape[1], 1 if by_t is None else by_t.shape[1],
            **settings(numbers, scales, transposed=codes_t is not None, assembly=x.is_cuda),
            num_warps=WARPS, num_stages=1,
        )  # fmt: skip


def _check(x: Tensor, numbers: str, scales: str, scale: Tensor | None) -> None:
    if numbers not in STORAGE:
        raise ConfigError(f"numbers={numbers!r} is not a float8; use one of {', '.join(STORAGE)}")
    if scales not in SCALES:
        raise ConfigError(f"scales={scales!r} is unknown; use one of {', '.join(SCALES)}")
    if x.dim() != 2 or 0 in x.shape or x.dtype not in INPUTS:
        raise UnsupportedOp(
            f"x: a cast in Triton takes matrices in bfloat16, float16 or float32 that are not empty, found "
            f"{x.dtype} of shape {tuple(x.shape)}"
        )
    if (scale is None) == (scales == "given"):
        raise ConfigError(f"scale with scales={scales!r}: it belongs to 'given', and only to it")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ConfigError(
            f"scale: one number in float32 is needed, found {scale.dtype} of shape {tuple(scale.shape)}"
        )


cast_dual = define(
    "cast_dual(Tensor x, str numbers, str scales, Tensor? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _cast_dual,
    _fake_dual,
)
cast_plain = define(
    "cast_plain(Tensor x, str numbers, str scales) -> (Tensor, Tensor)", _cast_plain, _fake_plain
)
