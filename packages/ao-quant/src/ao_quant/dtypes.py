"""Number formats of ao-quant: codebooks of 1 to 8 bits, and the LUT of iq4_nl."""

from __future__ import annotations

from ao_core import DType, lut_dtype
from ao_core.ext import codebook_dtype

__all__ = ["DTYPES"]

#: of ggml's type IQ4_NL, denser around 0
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

DTYPES: tuple[DType, ...] = (
    *(codebook_dtype(f"codebook{bits}", bits) for bits in range(1, 9)),
    lut_dtype("iq4_nl", _IQ4_NL),
)
