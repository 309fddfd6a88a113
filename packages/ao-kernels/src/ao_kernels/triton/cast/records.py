"""The kernel that quantizes matrices to float8; the custom ops behind it are made when it is first called."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import WHOLE, Call, Kernel, Spec
from ao_core.ext import Parts
from ao_kernels.triton.shared.device import unavailable_float8
from ao_kernels.triton.shared.dtypes import INPUTS
from ao_kernels.triton.shared.known_answer import Sample, noise, proven

__all__ = ["CAST_KERNELS", "STORAGE", "quantize_both", "quantize_plain"]

STORAGE = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
_BLOCKS: dict[tuple[int, ...], str] = {
    (WHOLE, WHOLE): "tensor",
    (1, WHOLE): "row",
    (1, 128): "block",
}


def quantize_plain(x: Tensor, spec: Spec) -> Parts:
    """The parts of a matrix, as the reference gives them: see `cast_dual`."""
    from ao_kernels.triton.cast.op import cast_plain

    codes, scale = cast_plain(x, spec.dtype, _BLOCKS[spec.block])
    return {"qdata": codes, "scale": scale}


def quantize_both(x: Tensor, spec: Spec) -> tuple[Parts, Parts]:
    """The parts of a matrix and of its transpose: see `cast_dual`."""
    from ao_kernels.triton.cast.op import cast_dual

    codes, scale, codes_t, scale_t = cast_dual(x, spec.dtype, _BLOCKS[spec.block])
    return {"qdata": codes, "scale": scale}, {"qdata": codes_t, "scale": scale_t}


def _refuses(call: Call) -> str | None:
    spec = call.spec
    if spec.dtype not in STORAGE or (spec.scale_dtype, spec.zero_point) != ("float32", "none"):
        return f"casts to f8e4m3 and f8e5m2 with scales in float32 and no zero points, found {spec}"
    if spec.option("scale_rule", "absmax") != "absmax":
        return f"follows the largest magnitude, found {dict(spec.options)}"
    if spec.block not in _BLOCKS:
        return f"needs a scale for the tensor, for a row, or for 128 numbers of it, found {spec}"
    if call.x_dtype not in INPUTS:
        return f"reads bfloat16, float16 and float32, not {call.x_dtype}"
    if len(call.x_shape) != 2 or 0 in call.x_shape:
        return f"casts matrices that are not empty, found shape {call.x_shape}"
    return None


def _sample(call: Call) -> Sample:
    """More than a tile in either dimension."""
    return Sample(
        (repr(call.spec), call.x_dtype),
        lambda: (noise((130, 144), call.x_dtype), call.spec),
    )


CAST_KERNELS = tuple(
    Kernel(
        f"triton_{op}_plain", op, "plain", "cuda", fn, 50, unavailable_float8,
        proven(op, fn, _refuses, _sample),
    )
    for op, fn in (("quantize", quantize_plain), ("quantize_both", quantize_both))
)  # fmt: skip
