"""Blocks of numbers with a small scale, quantized and dequantized in one pass: MX and NVFP4.

The custom op behind the kernel is made when that is first called.
"""

from __future__ import annotations

from torch import Tensor

from ao_core import WHOLE, Call, DType, Kernel, Spec
from ao_core.ext import registry
from ao_core.ext.numerics import FloatFormat
from ao_kernels.triton.shared.device import unavailable
from ao_kernels.triton.shared.dtypes import INPUTS
from ao_kernels.triton.shared.known_answer import Sample, noise, proven

__all__ = ["BLOCK_KERNELS", "fake_quantize", "float_format", "kind_of"]

#: numbers that may share a scale
_SIZES = (16, 32, 64, 128)
#: the global scale of NVFP4
_NESTED = Spec("f8e4m3", (WHOLE, WHOLE))


def fake_quantize(x: Tensor, spec: Spec) -> Tensor:
    """`x` (…, K) quantized to MX or NVFP4 and back, read once, or twice where the tensor has a scale.

    With powers of two for scales it has the bits of the reference; with others, values may be one step
    off where a scale is below 2**-86.
    """
    from ao_kernels.triton.fake_quantize.op import round_blocks

    mode = str(spec.option("mx_mode", "floor"))
    out: Tensor = round_blocks(x, spec.dtype, spec.block[-1], str(kind_of(spec)), mode)
    return out


def kind_of(spec: Spec) -> str | None:
    """How the kernel finds scales: "e8m0", "e4m3", "nested"; None where it does not."""
    if spec.scale_dtype in ("e8m0", "e4m3"):
        return str(spec.scale_dtype)
    return "nested" if spec.scale_dtype == _NESTED else None


def float_format(dtype: DType) -> FloatFormat | None:
    """How a number format of kind "float" is made up."""
    found = getattr(dtype.encode, "keywords", {}).get("fmt")
    return found if isinstance(found, FloatFormat) else None


def _refuses(call: Call) -> str | None:
    spec, dtype = call.spec, registry.dtypes.get(call.spec.dtype)
    kind = kind_of(spec)
    if kind is None or spec.zero_point != "none":
        return f"has scales in e8m0, in e4m3, and those with one in float32 for all, found {spec}"
    if float_format(dtype) is None and (spec.dtype, kind) != ("int8", "e8m0"):
        return f"gives floats of up to 8 bits, and int8 with scales in e8m0, found {spec}"
    if spec.block[:-1] not in ((), (1,)) or spec.block[-1] not in _SIZES:
        return f"needs blocks of {_SIZES} along each row, found {spec.block}"
    if spec.option("scale_rule", "absmax") != "absmax":
        return f"follows the largest magnitude, found {dict(spec.options)}"
    if call.x_dtype not in INPUTS:
        return f"reads bfloat16, float16 and float32, not {call.x_dtype}"
    if not call.x_shape or 0 in call.x_shape:
        return f"takes tensors with dimensions that are not empty, found shape {call.x_shape}"
    if kind == "nested" and len(call.x_shape) != 2:
        return f"has one scale for a matrix, found shape {call.x_shape}"
    return None


def _sample(call: Call) -> Sample:
    """Whole blocks, and a shorter one at the end of each row where the call has such."""
    block = call.spec.block[-1]
    k = 4 * block - (8 if call.x_shape[-1] % block else 0)
    return Sample(
        (repr(call.spec), call.x_dtype, k),
        lambda: (noise((33, k), call.x_dtype), call.spec),
    )


BLOCK_KERNELS = (
    Kernel(
        "triton_fake_quantize", "fake_quantize", "plain", "cuda", fake_quantize, 50, unavailable,
        proven("fake_quantize", fake_quantize, _refuses, _sample),
    ),
)  # fmt: skip
