"""The kernels that quantize rows; the custom op behind them is made when one is first called."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ao_core import WHOLE, Call, Kernel, Spec
from ao_core.ext import Parts, make_parts
from ao_kernels.triton.shared.device import unavailable, unavailable_float8
from ao_kernels.triton.shared.dtypes import INPUTS
from ao_kernels.triton.shared.known_answer import Sample, noise, proven

__all__ = ["FLOAT8", "ROW_KERNELS", "quantize", "rms_norm_quantize", "silu_mul_quantize"]

FLOAT8, _INTEGERS = ("f8e4m3", "f8e5m2"), ("int8", "uint8")
#: the longest row: a CTA holds it in registers
_LONGEST = 32 * 1024


def _parts(
    x: Tensor, spec: Spec, source: str, other: Tensor | None = None, eps: float = 0.0
) -> Parts:
    """Of x (…, K), in as many dimensions."""
    from ao_kernels.triton.rows.op import row_codes

    shape = x.shape
    codes, scale, zero_point = row_codes(x.reshape(-1, shape[-1]), other, spec.dtype, source, eps)
    grid = (*shape[:-1], 1)
    points = zero_point.reshape(grid) if spec.zero_point == "int" else None
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


def _refuses(call: Call, formats: tuple[str, ...]) -> str | None:
    spec = call.spec
    if spec.dtype not in formats or spec.scale_dtype != "float32":
        return f"gives {' and '.join(formats)} with scales in float32, found {spec}"
    if spec.zero_point != ("int" if spec.dtype == "uint8" else "none"):
        return f"has zero points of uint8, and only those, found {spec}"
    if spec.block != (1, WHOLE):
        return f"needs one scale per row, found {spec}"
    if spec.option("scale_rule", "absmax") != "absmax":
        return f"follows the largest magnitude, found {dict(spec.options)}"
    if call.x_dtype not in INPUTS:
        return f"reads bfloat16, float16 and float32, not {call.x_dtype}"
    if call.m == 0 or not 1 <= call.x_shape[-1] <= _LONGEST:
        return f"takes rows of up to {_LONGEST} numbers, found shape {call.x_shape}"
    return None


def _sample(call: Call, op: str) -> Sample:
    """Two rows: the same codes, or where the activations are computed in the same pass, those beside them."""
    k, dtype = call.x_shape[-1], call.x_dtype

    def arguments() -> tuple[object, ...]:
        x = noise((2, k), dtype)
        if op == "rms_norm_quantize":
            return x, noise((k,), dtype), 1e-6, call.spec
        return (x, x.flip(1), call.spec) if op == "silu_mul_quantize" else (x, call.spec)

    return Sample((repr(call.spec), dtype, k), arguments, 0.0 if op == "quantize" else 0.13)


def _kernels(numbers: str, formats: tuple[str, ...], unavailable: Any) -> tuple[Kernel, ...]:
    def refuses(call: Call) -> str | None:
        return _refuses(call, formats)

    # before the cast of tiles, which reads rows twice
    return tuple(
        Kernel(
            f"triton_{numbers}_{op}", op, "plain", "cuda", fn, 51, unavailable,
            proven(op, fn, refuses, partial(_sample, op=op)),
        )
        for op, fn in (
            ("quantize", quantize),
            ("rms_norm_quantize", rms_norm_quantize),
            ("silu_mul_quantize", silu_mul_quantize),
        )
    )  # fmt: skip


ROW_KERNELS = (
    *_kernels("float8", FLOAT8, unavailable_float8),
    *_kernels("int8", _INTEGERS, unavailable),
)
