"""Independent answers for number formats: other libraries' tables, and brute force in float64.

Of formats with more codes than can be tried, a spread of them stands for all.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ao_core.records import DType

__all__ = [
    "codes_from",
    "decoded",
    "foreign_table",
    "increasing",
    "integer_order",
    "nearest",
    "probes",
]

#: names of ml_dtypes for formats whose own names differ
_ML_DTYPES = {
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f6e3m2": "float6_e3m2fn",
    "f6e2m3": "float6_e2m3fn",
    "f4e2m1": "float4_e2m1fn",
    "bf16": "bfloat16",
}
#: names of NumPy for dense formats
_NUMPY = {"fp16": "float16", "fp32": "float32"}
#: integers of the width of a code
_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
_GFLOAT = {
    "f8e4m3": "format_info_ocp_e4m3",
    "f8e5m2": "format_info_ocp_e5m2",
    "f6e3m2": "format_info_ocp_e3m2",
    "f6e2m3": "format_info_ocp_e2m3",
    "f4e2m1": "format_info_ocp_e2m1",
}


def codes_from(bits: Tensor, fmt: DType) -> Tensor:
    """Codes with these bit patterns, integers."""
    width = 8 * fmt.code_dtype.itemsize
    # torch has signed integers of more than 8 bits: the same bits
    signed = bits if width == 8 else torch.where(bits >> (width - 1) > 0, bits - (1 << width), bits)
    return signed.to(_INTEGERS[width]).view(fmt.code_dtype)


def _patterns(fmt: DType) -> Tensor:
    """Every bit pattern of a format, int64, ascending; of more than 16 bits each 65521st of either sign."""
    half = 1 << (fmt.bits - 1)
    low = torch.arange(0, half, 1 if fmt.bits <= 16 else 65521)
    return torch.cat([low, low + half])


def all_codes(fmt: DType, device: str = "cpu") -> Tensor:
    """Every code of a format, or the spread of them, in the order of their bits."""
    return codes_from(_patterns(fmt), fmt).to(device)


def decoded(fmt: DType) -> Tensor:
    """The float64 value of every code, by code."""
    return fmt.decode(all_codes(fmt)).to(torch.float64)


def increasing(fmt: DType) -> Tensor:
    """Places of `all_codes` with finite values, from the least value to the greatest; -0 is before 0."""
    table = decoded(fmt)
    places = torch.cat(
        [torch.signbit(table).nonzero(), (~torch.signbit(table)).nonzero()]
    ).flatten()
    places = places[torch.isfinite(table[places])]
    return places[torch.argsort(table[places] + 0.0, stable=True)]


def integer_order(fmt: DType) -> Tensor:
    """Places of `all_codes` of integers from the least to the greatest: two's complement, or unsigned."""
    bits = _patterns(fmt)
    places = torch.arange(len(bits))
    low, high = places[bits < 1 << (fmt.bits - 1)], places[bits >= 1 << (fmt.bits - 1)]
    return torch.cat([high, low]) if fmt.min < 0 else places


def foreign_table(fmt: DType) -> list[float]:
    """The value of every code as someone else computes it.

    ml_dtypes where it is installed and knows the format, else gfloat likewise, which is told of floats by
    their names (f5e2m2: neither infinities nor NaN), else the definition: integers count, and what
    nobody else defines stands for itself.
    """
    codes = _patterns(fmt).tolist()
    if (foreign := _ml_dtype(fmt.name)) is not None:
        import numpy

        raw = numpy.array(codes).astype(f"u{max(fmt.bits // 8, 1)}")
        if fmt.bits < 8 and fmt.kind == "int" and fmt.min < 0:
            # ml_dtypes keeps a narrow signed integer sign-extended in its byte
            raw = (
                (raw.astype(numpy.int8) << (8 - fmt.bits)).astype(numpy.int8) >> (8 - fmt.bits)
            ).view(numpy.uint8)
        with numpy.errstate(invalid="ignore"):  # signalling NaN
            values: list[float] = raw.view(foreign).astype(numpy.float64).tolist()
        return values
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
        import numpy
    except ImportError:
        return None
    if name in _NUMPY:
        return getattr(numpy, _NUMPY[name])
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


def nearest(fmt: DType, x: Tensor) -> Tensor:
    """The value (float64) that stands for each finite `x`: the nearest one.

    Of two that are equally near, integers choose the even one, floats the one whose code is even, and
    LUTs the lower one. A format of 32 bits has every `x` itself.
    """
    x = x.to(torch.float64)
    if fmt.bits == 32:
        return x.clamp(fmt.min, fmt.max)
    order = increasing(fmt)
    values, codes = decoded(fmt)[order] + 0.0, _patterns(fmt)[order]
    # of two codes with one value, as those of both zeros, the last: the positive one
    last = torch.cat([values[1:] != values[:-1], torch.tensor([True])])
    if not fmt.rounds_to_zero:
        last &= values != 0
    values, codes = values[last], codes[last]
    inside = x.clamp(values[0], values[-1])
    if not fmt.rounds_to_zero:
        least = values.abs().amin()
        inside = torch.where(inside.abs() < least, least.copysign(inside), inside)
    above = torch.searchsorted(values, inside).clamp(max=len(values) - 1)
    below = torch.where(values[above] == inside, above, (above - 1).clamp(min=0))
    down, up = inside - values[below], values[above] - inside
    found = torch.where(down <= up, below, above)
    if fmt.kind != "lut":
        parity = values if fmt.kind == "int" else codes.to(torch.float64)
        to_above = (down == up) & (parity[above] % 2 == 0) & (parity[below] % 2 != 0)
        found = torch.where(to_above, above, found)
    return values[found] if fmt.rounds_to_zero else torch.where(x == 0, 0.0, values[found])


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
