"""Number formats of ao-quant: codebooks of 1 to 8 bits, and the LUTs of other projects' files."""

from __future__ import annotations

from ao_core import DType, lut_dtype
from ao_core.ext import codebook_dtype
from ao_core.ext.numerics import dynamic_values

__all__ = ["BNB_FP4", "DTYPES"]

#: of ggml's type IQ4_NL, denser around 0
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

#: twelfths that bitsandbytes' fp4 has, by the lower three bits of its codes
BNB_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)

DTYPES: tuple[DType, ...] = (
    *(codebook_dtype(f"codebook{bits}", bits) for bits in range(1, 9)),
    lut_dtype("iq4_nl", _IQ4_NL),
    lut_dtype(
        "bnb_fp4", sorted({sign * twelfths / 12 for twelfths in BNB_FP4 for sign in (-1, 1)})
    ),
    # of scales of scales, as bitsandbytes nests them
    lut_dtype("bnb_map8", dynamic_values(8, signed=True)),
)
