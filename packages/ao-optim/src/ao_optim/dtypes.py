"""The number formats of optimizer state: LUTs that are fine near zero."""

from __future__ import annotations

from ao_core import DType, lut_dtype
from ao_core.ext.numerics import (
    companded_values,
    dynamic_values,
    linear_values,
    unsigned_float_values,
)

__all__ = ["DTYPES"]

DTYPES: tuple[DType, ...] = (
    lut_dtype("dynamic8", dynamic_values(8, signed=True)),
    lut_dtype("dynamic8u", dynamic_values(8, signed=False)),
    lut_dtype("companded8", companded_values(signed=True)),
    lut_dtype("companded8u", companded_values(signed=False)),
    lut_dtype("f8e5m3u", unsigned_float_values()),
    lut_dtype("dynamic4", dynamic_values(4, signed=True)),
    lut_dtype("linear4u", linear_values(4)),
)
