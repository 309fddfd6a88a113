"""Rows quantized in one pass: as they are, after RMSNorm, or after SiLU and a product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Parts
from ao_core.layouts.base import make_parts
from ao_core.records import Call, Kernel
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_kernels.triton.assembly import divide, refine, round_pair
from ao_kernels.triton.launch import ELEMENTS
from ao_kernels.triton.support import on_device, why_not, why_not_float8

__all__ = ["ROW_KERNELS", "SOURCES", "launch_shape", "row_codes", "settings"]

#: what is quantized: the rows; after RMSNorm; SiLU of them times others
SOURCES = ("plain", "rms_norm", "silu_mul")
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT8, _INTEGERS = ("f8e4m3", "f8e5m2"), ("int8", "uint8")
#: numbers that a block holds in registers at least, and what a thread does, so that the longest rows fit
_FEWEST, _A_THREAD, _LONGEST = 2048, 32, 32 * 1024


def launch_shape(k: int) -> tuple[int, int, int]:
    """Rows and columns of a block for rows of k numbers, and its warps."""
    cols = max(16, 1 << (k - 1).bit_length())
    rows = max(1, _FEWEST // cols)
    return rows, cols, max(2, rows * cols // (32 * _A_THREAD))


def settings(numbers: str, source: str, dtype: torch.dtype, *, assembly: bool) -> dict[str, Any]:
    """The compile-time arguments of the kernel but for its sizes."""
    import triton.language as tl

    float8 = numbers in _FLOAT8
    return {
        "SOURCE": source,
        "KIND": "float" if float8 else "signed" if numbers == "int8" else "unsigned",
        "FORMAT": {"f8e4m3": tl.float8e4nv, "f8e5m2": tl.float8e5}.get(numbers),
        "MBITS": 3 if numbers == "f8e4m3" else 2,
        # half of the steps that the range of a row with a zero point has
        "REACH": 127.5 if numbers == "uint8" else registry.dtypes.get(numbers).reach,
        "DIVIDE": divide() if assembly else None,
        "SATURATE": divide(saturating=True, sm80=not float8) if assembly else None,
        "REFINE": refine() if assembly else None,
        "ROUND": round_pair(ELEMENTS[dtype]) if assembly and dtype in ELEMENTS else None,
    }


@torch.library.custom_op("ao_kernels::row_codes", mutates_args=())
def row_codes(
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
    from ao_kernels.triton.kernels import rows

    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), (codes, scale, zero), stride = x.shape, _outputs(x, numbers), 0
    if source == "silu_mul":
        assert other is not None
        other = other if other.stride(1) == 1 else other.contiguous()
        stride = other.stride(0)
    elif source == "rms_norm":
        stride = 0 if other is None else 1
        other = x.new_ones(1) if other is None else other.contiguous()
    held, cols, warps = launch_shape(k)
    with on_device(x):
        rows.quantize_rows[(-(-m // held),)](
            x, x if other is None else other, codes, scale, zero, m, k, x.stride(0), stride, eps, held,
            cols, **settings(numbers, source, x.dtype, assembly=x.is_cuda), num_warps=warps, num_stages=1,
        )  # fmt: skip
    return codes, scale, zero


@row_codes.register_fake
def _(
    x: Tensor, other: Tensor | None, numbers: str, source: str, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, numbers)


def _outputs(x: Tensor, numbers: str) -> tuple[Tensor, Tensor, Tensor]:
    m = len(x)
    return (
        x.new_empty(x.shape, dtype=registry.dtypes.get(numbers).storage),
        x.new_empty((m, 1), dtype=torch.float32),
        x.new_empty((m if numbers == "uint8" else 0, 1), dtype=torch.uint8),
    )


def _parts(
    x: Tensor, spec: Spec, source: str, other: Tensor | None = None, eps: float = 0.0
) -> Parts:
    """Of x (…, K), in as many dimensions."""
    shape = x.shape
    codes, scale, zero = row_codes(x.reshape(-1, shape[-1]), other, spec.dtype, source, eps)
    grid = (*shape[:-1], 1)
    points = zero.reshape(grid) if spec.zero == "int" else None
    return make_parts(codes.reshape(shape), scale.reshape(grid), points)


def quantize(x: Tensor, spec: Spec) -> Parts:
    """The parts of rows with a scale each, as the reference gives them."""
    return _parts(x, spec, "plain")


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float, spec: Spec) -> Parts:
    """RMSNorm over the last dimension, quantized where it is computed."""
    return _parts(x, spec, "rms_norm", weight, eps)


def silu_mul_quantize(gate: Tensor, up: Tensor, spec: Spec) -> Parts:
    """Silu(gate) · up, quantized where it is computed."""
    return _parts(gate, spec, "silu_mul", up.reshape(-1, up.shape[-1]))


def _accepts(call: Call, formats: tuple[str, ...]) -> str | None:
    spec = call.spec
    if spec.dtype not in formats or spec.scale_dtype != "float32":
        return f"gives {' and '.join(formats)} with scales in float32, found {spec}"
    if spec.zero != ("int" if spec.dtype == "uint8" else "none"):
        return f"has zero points of uint8, and only those, found {spec}"
    if spec.block != (1, WHOLE):
        return f"needs a scale a row, found {spec}"
    if spec.option("scale_rule", "absmax") != "absmax":
        return f"follows the largest magnitude, found {dict(spec.options)}"
    if call.x_dtype not in _INPUTS:
        return f"reads bfloat16, float16 and float32, not {call.x_dtype}"
    if call.m == 0 or not 1 <= call.x_shape[-1] <= _LONGEST:
        return f"takes rows of up to {_LONGEST} numbers, found shape {call.x_shape}"
    return None


def _kernels(numbers: str, formats: tuple[str, ...], available: Any) -> tuple[Kernel, ...]:
    def accepts(call: Call) -> str | None:
        return _accepts(call, formats)

    # before the cast of tiles, which reads rows twice
    return tuple(
        Kernel(f"triton_{numbers}_{op}", op, "plain", "cuda", fn, 51, available, accepts)
        for op, fn in (
            ("quantize", quantize),
            ("rms_norm_quantize", rms_norm_quantize),
            ("silu_mul_quantize", silu_mul_quantize),
        )
    )


ROW_KERNELS = (
    *_kernels("float8", _FLOAT8, why_not_float8),
    *_kernels("int8", _INTEGERS, why_not),
)
