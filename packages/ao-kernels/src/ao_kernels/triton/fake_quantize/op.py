"""The custom op of `ao_kernels.triton.fake_quantize.records`, and how its kernel is specialized."""

from __future__ import annotations

from math import frexp
from typing import Any

import torch
from torch import Tensor

from ao_core import DType
from ao_core.ext import registry
from ao_kernels.triton.cast.op import TILES
from ao_kernels.triton.cast.op import WARPS as CAST_WARPS
from ao_kernels.triton.fake_quantize.records import float_format
from ao_kernels.triton.shared.device import on_device
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.ptx import divide, refine

__all__ = ["HELD", "WARPS", "round_blocks", "settings"]

#: numbers that a CTA holds in registers, and its warps
HELD, WARPS = 4096, 4
#: more than the mantissa of any number in float32
_NEVER = 1 << 23


def _round_blocks(x: Tensor, numbers: str, block: int, scales: str, mode: str) -> Tensor:
    """The values of x (…, K) in a format of blocks, in the dtype of x.

    Args:
        x: bfloat16, float16 or float32, finite or not.
        numbers: the name of a format of kind "float", or "int8".
        block: neighbouring numbers of a row that share a scale: 16, 32, 64 or 128; the last of a row fewer.
        scales: "e8m0"; "e4m3"; "nested", e4m3 with one in float32 for all.
        mode: of "e8m0" how the power of two is chosen, see `ao_core.numerics.mx.choose_e8m0`.
    """
    from ao_kernels.triton.cast.kernel import amax
    from ao_kernels.triton.fake_quantize.kernel import round_rows

    x_MK = x.contiguous().view(-1, x.shape[-1])
    (m, k), out = x_MK.shape, torch.empty_like(x, memory_format=torch.contiguous_format)
    a_row, held = -(-k // block), HELD // block
    with on_device(x):
        found = x.new_zeros(1, dtype=torch.float32)
        if scales == "nested":
            bits = found.view(torch.int32)
            amax[(-(-m // (128 * TILES)), -(-k // 128))](
                x_MK, bits, bits, m, k, 2 * TILES, "tensor", False, num_warps=CAST_WARPS
            )
        round_rows[(-(-m * a_row // held),)](
            x_MK, found, out, m * a_row, k, a_row, held, block, k % block == 0,
            **settings(numbers, scales, mode, assembly=x.is_cuda), num_warps=WARPS, num_stages=1,
        )  # fmt: skip
    return out


def settings(numbers: str, scales: str, mode: str, *, assembly: bool) -> dict[str, Any]:
    """The compile-time arguments of the kernel but for its sizes."""
    dtype = registry.dtypes.get(numbers)
    fmt = float_format(dtype)
    below, carry = _exponents(dtype, mode)
    divides = assembly and scales != "e8m0"
    return {
        "SCALES": scales,
        "MBITS": 0 if fmt is None else fmt.mbits,
        "MIN_NORMAL": 0.0 if fmt is None else fmt.smallest_normal,
        "QMAX": float(dtype.max),
        "BELOW": below,
        "CARRY": carry,
        "DIVIDE": divide() if divides else None,
        "SATURATE": divide(saturating=True, sm80=True) if divides else None,
        "REFINE": refine() if divides else None,
    }


def _exponents(dtype: DType, mode: str) -> tuple[int, int]:
    """`choose_e8m0` in bits of float32: what exponents lose, and the mantissa from which on one less."""
    mantissa, exponent = frexp(dtype.max)
    fmt = float_format(dtype)
    step = 1.0 if fmt is None else 2.0 ** (fmt.emax - fmt.mbits)
    carries = {
        "floor": _NEVER,
        "ceil": 1,
        "even": _mantissa(1.0 - step / 2.0 ** (exponent + 1)),
        "rceil": _mantissa(mantissa) + 1,
    }
    return exponent - 1, carries[mode]


def _mantissa(number: float) -> int:
    """Of a number in [0.5, 1) the bits behind its exponent."""
    return round((2 * number - 1) * (1 << 23))


round_blocks = define(
    "round_blocks(Tensor x, str numbers, int block, str scales, str mode) -> Tensor",
    _round_blocks,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
