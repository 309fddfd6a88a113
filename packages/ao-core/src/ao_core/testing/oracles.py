"""Independent answers for number formats: other libraries' tables, and brute force in float64."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ao_core.records import DType

__all__ = ["decoded", "foreign_table", "natural_order", "nearest", "probes"]

#: names of ml_dtypes for formats whose own names differ
_ML_DTYPES = {
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f6e3m2": "float6_e3m2fn",
    "f6e2m3": "float6_e2m3fn",
    "f4e2m1": "float4_e2m1fn",
}
_GFLOAT = {
    "f8e4m3": "format_info_ocp_e4m3",
    "f8e5m2": "format_info_ocp_e5m2",
    "f6e3m2": "format_info_ocp_e3m2",
    "f6e2m3": "format_info_ocp_e2m3",
    "f4e2m1": "format_info_ocp_e2m1",
}


def all_codes(fmt: DType, device: str = "cpu") -> Tensor:
    """Every bit pattern of a format, ascending."""
    return torch.arange(1 << fmt.bits, device=device).to(torch.uint8)


def decoded(fmt: DType) -> Tensor:
    """The float64 value of every code, by code."""
    return fmt.decode(all_codes(fmt)).to(torch.float64)


def natural_order(fmt: DType) -> Tensor:
    """All codes from the least value to the greatest, as the kind of format arranges them.

    Unsigned integers and codebooks: by code. Signed integers: two's complement. Floats: sign and
    magnitude.
    """
    codes = all_codes(fmt).to(torch.int64)
    half = 1 << (fmt.bits - 1)
    if fmt.kind == "float":
        return torch.cat([codes[half:].flip(0), codes[:half]])
    if fmt.kind == "int" and fmt.min < 0:
        return torch.cat([codes[half:], codes[:half]])
    return codes


def foreign_table(fmt: DType) -> list[float]:
    """The value of every code as someone else computes it.

    ml_dtypes where it is installed and knows the format, else gfloat likewise, which is told of floats by
    their names (f5e2m2: neither infinities nor NaN), else the definition: integers count, and what
    nobody else defines stands for itself.
    """
    codes = range(1 << fmt.bits)
    if (foreign := _ml_dtype(fmt.name)) is not None:
        import numpy

        raw = numpy.arange(1 << fmt.bits, dtype=numpy.uint8)
        if fmt.bits < 8 and fmt.kind == "int" and fmt.min < 0:
            # ml_dtypes keeps a narrow signed integer sign-extended in its byte
            raw = (
                (raw.astype(numpy.int8) << (8 - fmt.bits)).astype(numpy.int8) >> (8 - fmt.bits)
            ).view(numpy.uint8)
        return [float(value) for value in raw.view(foreign).astype(numpy.float64)]
    if (info := _gfloat_info(fmt.name)) is not None:
        import gfloat

        return [float(gfloat.decode_float(info, code).fval) for code in codes]
    if fmt.kind == "int":
        half = 1 << (fmt.bits - 1)
        signed = [code - 2 * half if fmt.min < 0 and code >= half else code for code in codes]
        return [float(min(max(value, fmt.min), fmt.max)) for value in signed]
    return decoded(fmt).tolist()


def _ml_dtype(name: str) -> Any:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return getattr(ml_dtypes, _ML_DTYPES.get(name, name), None)


def _gfloat_info(name: str) -> Any:
    try:
        from gfloat import Domain, FormatInfo, formats
    except ImportError:
        return None
    if name in _GFLOAT:
        return getattr(formats, _GFLOAT[name], None)
    if (match := re.fullmatch(r"f(\d)e(\d)m(\d)", name)) is None:
        return None
    bits, ebits, mbits = map(int, match.groups())
    return FormatInfo(
        name,
        bits,
        mbits + 1,
        bias=2 ** (ebits - 1) - 1,
        is_signed=True,
        domain=Domain.Finite,
        has_nz=True,
        num_high_nans=0,
        has_subnormals=True,
        is_twos_complement=False,
    )


def nearest(fmt: DType, x: Tensor) -> tuple[Tensor, Tensor]:
    """The values (float64) that may stand for each finite `x`: the nearest one below or at, and above.

    Both are equal except where `x` lies exactly between two values; then integers choose the even
    one, floats the one whose code is even, and codebooks are free to take either.
    """
    table = decoded(fmt)
    codes = natural_order(fmt)
    finite = torch.isfinite(table[codes])
    codes = codes[finite]
    values, codes = _unique(table[codes], codes)
    x = x.to(torch.float64).clamp(values[0], values[-1])
    above = torch.searchsorted(values, x).clamp(max=len(values) - 1)
    below = torch.where(values[above] == x, above, (above - 1).clamp(min=0))
    down, up = x - values[below], values[above] - x
    low = torch.where(down <= up, below, above)
    high = torch.where(up <= down, above, below)
    if fmt.kind != "codebook":
        parity = values if fmt.kind == "int" else codes.to(torch.float64)
        even_low, even_high = parity[low] % 2 == 0, parity[high] % 2 == 0
        low, high = (
            torch.where(even_high & ~even_low, high, low),
            torch.where(even_low & ~even_high, low, high),
        )
    return values[low], values[high]


def _unique(values: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Increasing values with one code each; of the two zeros the positive one, as the even code."""
    values, order = torch.sort(values + 0.0, stable=True)
    codes = codes[order]
    last = torch.cat([values[1:] != values[:-1], torch.tensor([True])])
    return values[last], codes[last]


def probes(fmt: DType) -> Tensor:
    """Finite float32 inputs where rounding can go wrong: values, midpoints, and the floats beside them."""
    values = decoded(fmt)
    values = values[torch.isfinite(values)].unique()
    between = (values[1:] + values[:-1]) / 2
    exact = torch.cat(
        [values, between, torch.tensor([fmt.min * 1.5, fmt.max * 1.5]).double()]
    ).float()
    up = torch.nextafter(exact, torch.tensor(torch.inf))
    down = torch.nextafter(exact, torch.tensor(-torch.inf))
    return torch.cat([exact, up, down])
