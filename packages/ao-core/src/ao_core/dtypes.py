"""The built-in number formats, and constructors for more."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import isfinite

import torch

from ao_core.arguments import checked
from ao_core.errors import ConfigError
from ao_core.numerics import dense, floats, ints, lut
from ao_core.numerics.formats import E4M3, E5M2, FloatFormat, float_format
from ao_core.records import DType

__all__ = [
    "BUILTIN_DTYPES",
    "CODED_DTYPES",
    "DENSE_DTYPES",
    "FLOATS",
    "codebook_dtype",
    "dense_dtype",
    "float_dtype",
    "float_name",
    "int_dtype",
    "lut_dtype",
]

# encode and decode are partials of module functions, so that records pickle and deep-copy.


@checked
def int_dtype(name: str, bits: int, signed: bool = True) -> DType:
    """An integer format: two's complement, or unsigned.

    For signed formats, a block's largest magnitude is scaled to (2**bits - 1) / 2, half a step beyond the
    largest value. That is the smallest step at which no element moves by more than half a step. (Small blocks
    use the largest value, see `numerics.quant_max_of`.) Only int1, whose values are -1 and 0, has a
    `quant_max` of 1, because 0.5 would round every element to 0.

    Args:
        name: of the format, e.g. "int3x".
        bits: 1 to 8.
        signed: two's complement from -2**(bits - 1); else from 0.

    Raises:
        ConfigError: `bits` is not in 1 to 8.
    """
    if not 1 <= bits <= 8:
        raise ConfigError(f"bits={bits}: an integer format has 1 to 8 bits")
    low = -(1 << (bits - 1)) if signed else 0
    high = low + (1 << bits) - 1
    return DType(
        name=name,
        bits=bits,
        kind="int",
        encode=partial(ints.encode_int, bits=bits, low=low, high=high),
        decode=partial(ints.decode_int, bits=bits, low=low, high=high),
        min=low,
        max=high,
        quant_max=max(1.0, (high - low) / 2) if signed else high,
        storage=torch.int8 if signed and bits == 8 else torch.uint8,
        summary=f"{'signed' if signed else 'unsigned'} integer, {low} to {high}",
    )


@checked
def float_dtype(name: str, fmt: FloatFormat) -> DType:
    """A floating-point format with a sign, described by a `FloatFormat`."""
    of_torch = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
    return DType(
        name=name,
        bits=fmt.bits,
        kind="float",
        encode=partial(floats.encode_float, fmt=fmt),
        decode=partial(floats.decode_float, fmt=fmt),
        min=-fmt.max,
        max=fmt.max,
        quant_max=fmt.max,
        storage=of_torch.get(fmt, torch.uint8),
        summary=f"float with {fmt.ebits} bits of exponent, {fmt.mbits} of mantissa, ±{fmt.max:g}",
    )


@checked
def lut_dtype(name: str, values: Sequence[float]) -> DType:
    """A format whose codes index a table of values, kept as float32. A tie rounds to the lower value.

    Args:
        name: of the format, e.g. "thirds".
        values: 2 to 256 of them, finite and strictly increasing in float32. The number of bits follows.

    Raises:
        ConfigError: there are fewer or more values, or they do not increase.
    """
    # not by torch: formats are made while a package is imported, in whatever mode the program is then
    table = tuple(array("f", values))
    if not 2 <= len(table) <= 256:
        raise ConfigError(f"values: a LUT has 2 to 256 of them, got {len(table)}")
    if not all(a < b for a, b in pairwise(table)) or not all(map(isfinite, table)):
        raise ConfigError(f"values={values!r}: must be finite and strictly increasing in float32")
    return DType(
        name=name,
        bits=(len(table) - 1).bit_length(),
        kind="lut",
        encode=partial(lut.encode_between, bounds=lut.lut_bounds(table)),
        decode=partial(lut.decode_lut, values=table),
        min=table[0],
        max=table[-1],
        quant_max=max(-table[0], table[-1]),
        summary=f"LUT of {len(table)} values, {table[0]:g} to {table[-1]:g}",
        codes=len(table),
        has_zero=0.0 in table,
    )


def codebook_dtype(name: str, bits: int) -> DType:
    """A format with learned values: 2**bits per block, stored with the block in the part `scale`.

    Args:
        name: of the format.
        bits: 1 to 8.

    Raises:
        ConfigError: `bits` is not in 1 to 8.
    """
    if not 1 <= bits <= 8:
        raise ConfigError(f"bits={bits}: a codebook has 1 to 8 bits")
    places = int_dtype(name, bits, signed=False)
    summary = f"{1 << bits} values learned for each block"
    return replace(places, kind="codebook", storage=torch.uint8, summary=summary)


def dense_dtype(name: str, storage: torch.dtype) -> DType:
    """A format whose codes are the values themselves, as torch stores them: float32 or 16 bits of it."""
    info = torch.finfo(storage)
    return DType(
        name=name,
        bits=info.bits,
        kind="dense",
        encode=partial(dense.encode_dense, storage=storage),
        decode=dense.decode_dense,
        min=info.min,
        max=info.max,
        quant_max=info.max,
        storage=storage,
        summary=f"{str(storage).removeprefix('torch.')} as it is, without a scale",
    )


def float_name(ebits: int, mbits: int) -> str:
    """The name of a built-in float: (3, 2) -> "f6e3m2"."""
    return f"f{1 + ebits + mbits}e{ebits}m{mbits}"


#: (bits of exponent, of mantissa) of every built-in float of 3 to 8 bits
FLOATS: tuple[tuple[int, int], ...] = tuple(
    (ebits, bits - 1 - ebits)
    for bits in range(8, 2, -1)
    for ebits in range(min(bits - 2, 4 if bits < 8 else 5), 0, -1)
)
#: those that have NaN, the 8-bit floats of OCP; no other has any, nor infinities
_WITH_NAN = {(4, 3): E4M3, (5, 2): E5M2}


#: formats with codes of at most 8 bits
CODED_DTYPES: tuple[DType, ...] = (
    *(int_dtype(f"int{bits}", bits) for bits in range(1, 9)),
    *(int_dtype(f"uint{bits}", bits, signed=False) for bits in range(1, 9)),
    lut_dtype("ternary", (-1.0, 0.0, 1.0)),
    *(
        float_dtype(float_name(e, m), _WITH_NAN.get((e, m)) or float_format(e, m))
        for e, m in FLOATS
    ),
    lut_dtype("nf4", lut.NF4_VALUES),
)

#: for layouts that store fewer values than there are
DENSE_DTYPES: tuple[DType, ...] = (
    dense_dtype("bf16", torch.bfloat16),
    dense_dtype("fp16", torch.float16),
    dense_dtype("fp32", torch.float32),
)

BUILTIN_DTYPES: tuple[DType, ...] = (*CODED_DTYPES, *DENSE_DTYPES)
