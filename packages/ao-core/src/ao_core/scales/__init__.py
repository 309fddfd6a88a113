"""The built-in ways to choose scales and zero points: searches for better ones than absmax, without data."""

from __future__ import annotations

from ao_core.records import ScaleMethod
from ao_core.scales.hqq import hqq_qparams
from ao_core.scales.mse import mse_qparams

__all__ = ["BUILTIN_SCALES", "hqq_qparams", "mse_qparams"]

BUILTIN_SCALES: tuple[ScaleMethod, ...] = (
    ScaleMethod(
        "absmax", None, "from the largest magnitude, or the range, of a block: nothing clips"
    ),
    ScaleMethod("mse", mse_qparams, "the least squared error of a block that keeps its length"),
    ScaleMethod(
        "hqq", hqq_qparams, "half-quadratic quantization: as mse, for the sum of |error|**0.7"
    ),
)
