"""Rows quantized in one pass: as they are, after RMSNorm, or after SiLU and a product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core.ext import registry
from ao_kernels.triton.rows.records import FLOAT8
from ao_kernels.triton.shared.device import on_device, supports_pdl
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.ptx import divide, refine, round_pair
from ao_kernels.triton.shared.tile_config import options

__all__ = ["SOURCES", "launch_shape", "row_codes", "settings"]

#: what is quantized: the rows; after RMSNorm; SiLU of them times others
SOURCES = ("plain", "rms_norm", "silu_mul")
#: fewest numbers that a CTA holds in registers, and numbers per thread, so that the longest rows fit
_FEWEST, _A_THREAD = 2048, 32


def launch_shape(k: int) -> tuple[int, int, int]:
    """Rows and columns per CTA for rows of k numbers, and its warps."""
    cols = max(16, 1 << (k - 1).bit_length())
    rows = max(1, _FEWEST // cols)
    return rows, cols, max(2, rows * cols // (32 * _A_THREAD))


def settings(numbers: str, source: str, dtype: torch.dtype, *, assembly: bool) -> dict[str, Any]:
    """The compile-time arguments of the kernel but for its sizes."""
    import triton.language as tl

    float8 = numbers in FLOAT8
    return {
        "SOURCE": source,
        "KIND": "float" if float8 else "signed" if numbers == "int8" else "unsigned",
        "FORMAT": {"f8e4m3": tl.float8e4nv, "f8e5m2": tl.float8e5}.get(numbers),
        "MBITS": 3 if numbers == "f8e4m3" else 2,
        # half of the steps that the range of a row with a zero point has
        "QMAX": 127.5 if numbers == "uint8" else registry.dtypes.get(numbers).quant_max,
        "DIVIDE": divide() if assembly else None,
        "SATURATE": divide(saturating=True, sm80=not float8) if assembly else None,
        "REFINE": refine() if assembly else None,
        "ROUND": round_pair(ELEMENTS[dtype]) if assembly and dtype in ELEMENTS else None,
    }


def _row_codes(
    x: Tensor, other: Tensor | None, numbers: str, source: str, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of rows that are made from x (M, K), and what belongs to them.

    Args:
        x: bfloat16, float16 or float32; K up to 32768.
        other: of "rms_norm" the weight (K,), or None for ones; of "silu_mul" the factor (M, K).
        numbers: "f8e4m3", "f8e5m2" or "int8", by the largest magnitude of each row; "uint8", by its range.
        source: one of `SOURCES`.
        eps: of "rms_norm".

    Returns:
        codes (M, K); float32 scales (M, 1); of "uint8" zero points (M, 1), of others (0, 1).
    """
    from ao_kernels.triton.rows import kernel

    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), (codes, scale, zero_point), stride = x.shape, _outputs(x, numbers), 0
    if source == "silu_mul":
        assert other is not None
        other = other if other.stride(1) == 1 else other.contiguous()
        stride = other.stride(0)
    elif source == "rms_norm":
        stride = 0 if other is None else 1
        other = x.new_ones(1) if other is None else other.contiguous()
    held, cols, warps = launch_shape(k)
    pdl = supports_pdl(x.device)
    with on_device(x):
        kernel.quantize_rows[(-(-m // held),)](
            x, x if other is None else other, codes, scale, zero_point, m, k, x.stride(0), stride, eps, held,
            cols, **settings(numbers, source, x.dtype, assembly=x.is_cuda), PDL=pdl,
            **options(warps, 1, pdl=pdl),
        )  # fmt: skip
    return codes, scale, zero_point


def _outputs(x: Tensor, numbers: str) -> tuple[Tensor, Tensor, Tensor]:
    m = x.shape[0]
    return (
        x.new_empty(x.shape, dtype=registry.dtypes.get(numbers).storage),
        x.new_empty((m, 1), dtype=torch.float32),
        x.new_empty((m if numbers == "uint8" else 0, 1), dtype=torch.uint8),
    )


row_codes = define(
    "row_codes(Tensor x, Tensor? other, str numbers, str source, float eps=0.0) -> (Tensor, Tensor, Tensor)",
    _row_codes,
    lambda x, other, numbers, *_: _outputs(x, numbers),
)
