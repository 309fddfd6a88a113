"""Number formats of ao-quant: codes that are the places of learned values."""

from __future__ import annotations

from ao_core.dtypes import table_dtype
from ao_core.records import DType

__all__ = ["DTYPES"]

DTYPES: tuple[DType, ...] = tuple(table_dtype(f"lut{bits}", bits) for bits in range(1, 9))
