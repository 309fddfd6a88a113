"""The kernel of `scale_sums` on the CPU: a row stays in the cache while all candidates are tried."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel, Spec
from ao_core.ext import registry
from ao_kernels.cpu.formats import Format, format_of
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.quantize import ELEMENTS

__all__ = ["SUMS_KERNELS", "scale_sums"]


def scale_sums(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    importance: Tensor | None,
    power: float | None,
    spec: Spec,
) -> Tensor:
    """Sums of errors, (3 or 4, B, C), for each row of x (B, E) and each of its candidates (B, C).

    Of integers with 5 candidates or more, a value near a tie may be the other one. Sums of 256 elements
    are in float32, the rest in float64; the same bits for any number of threads.
    """
    fmt = format_of(registry.dtypes.get(spec.dtype))
    assert isinstance(fmt, Format)  # the kernel has accepted the call
    sums: Tensor = torch.ops.ao_kernels.scale_sums(x, scale, zero_point, importance, power, *fmt)
    return sums


def _refuses(call: Call) -> str | None:
    if call.x_dtype not in ELEMENTS:
        return f"reads float32, bfloat16 and float16, not {call.x_dtype}"
    if reason := unavailable():  # the library is asked how it encodes
        return reason
    fmt = format_of(registry.dtypes.get(call.spec.dtype))
    return fmt if isinstance(fmt, str) else None


def _describe(call: Call) -> str:
    return isa()


SUMS_KERNELS = (
    Kernel(
        "cpu_scale_sums",
        "scale_sums",
        "plain",
        "cpu",
        scale_sums,
        50,
        unavailable,
        _refuses,
        _describe,
    ),
)
