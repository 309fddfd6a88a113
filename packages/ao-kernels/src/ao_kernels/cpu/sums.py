"""Sums over blocks on the CPU.

`scale_sums` keeps a row in the cache while all candidates are tried; `learned_gradients` reads all once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import learned_gradients_reference
from ao_core.ext.numerics import may_be_compiled
from ao_kernels.cpu.formats import Format, format_of
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.quantize import ELEMENTS, known, refuses_codes

__all__ = ["SUMS_KERNELS", "learned_gradients", "refuses_sums", "scale_sums"]


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


def refuses_sums(call: Call) -> str | None:
    """Which formats and dtypes the sums are not for."""
    if call.x_dtype not in ELEMENTS:
        return f"reads float32, bfloat16 and float16, not {call.x_dtype}"
    if reason := unavailable():  # the library is asked how it encodes
        return reason
    fmt = format_of(registry.dtypes.get(call.spec.dtype))
    return fmt if isinstance(fmt, str) else None


def learned_gradients(
    x: Tensor, grad: Tensor, scale: Tensor, zero_point: Tensor | None, reach: float, spec: Spec
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and for each block the sums of those of its scale and of those outside its range.

    Sums of 256 elements are in float32, the rest in float64; the same bits for any number of threads.
    """
    if may_be_compiled(x):
        return learned_gradients_reference(x, grad, scale, zero_point, reach, spec)
    matrix, fmt = known(spec, tuple(x.shape), registry.dtypes.get(spec.dtype))
    of_x, sums = torch.ops.ao_kernels.learned_gradients(
        x.reshape(-1, matrix.block_k), grad.reshape(-1, matrix.block_k), scale.reshape(-1, 1),
        None if zero_point is None else zero_point.reshape(-1, 1), reach, *fmt,
    )  # fmt: skip
    return of_x.view(x.shape), sums.view(2, *scale.shape)


def _refuses_learned(call: Call) -> str | None:
    if reason := refuses_codes(call):
        return reason
    matrix, _ = known(call.spec, call.weight_shape, registry.dtypes.get(call.spec.dtype))
    if matrix.block_n > 1 or matrix.k % matrix.block_k:
        return f"needs blocks of one row that divide it, found {call.spec.block}"
    return None


def _describe(call: Call) -> str:
    return isa()


SUMS_KERNELS = tuple(
    Kernel(f"cpu_{op}", op, "plain", "cpu", fn, 50, unavailable, refuses, _describe)
    for op, fn, refuses in (
        ("scale_sums", scale_sums, refuses_sums),
        ("learned_gradients", learned_gradients, _refuses_learned),
    )
)
