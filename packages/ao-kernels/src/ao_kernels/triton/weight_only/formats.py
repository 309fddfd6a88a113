"""Which number formats the kernels of `plane16` know, and how."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import DType
from ao_kernels.cpu.codes import codes_of
from ao_kernels.triton.weight_only.decode_ptx import floats, integers, lookup
from ao_kernels.triton.weight_only.float4_ptx import float4, mantissa_of
from ao_kernels.triton.weight_only.lut_ptx import table_words
from ao_kernels.triton.weight_only.packing import Packing
from ao_kernels.triton.weight_only.sparse_ptx import selector_words, two_of_four

__all__ = ["TABLES", "Format", "format_of", "known"]

#: dtypes of the activations in the order of their tables in the part `table`
TABLES = (torch.bfloat16, torch.float16)


class Format(NamedTuple):
    """A number format as it is stored, and as matmuls take it."""

    bits: int
    #: exclusive or with it turns a canonical code into the stored one and back
    flip: int
    #: of each stored code, exact in float32
    values: tuple[float, ...]
    #: a matmul multiplies by value minus this; the zero-point correction makes up for it
    offset: int
    #: "bf16" or "fp16" → the text that turns words into such numbers
    assembly: Callable[[str], str]
    #: whether they are looked up: then words share their nibbles (`words.interleave`), and the kernel
    #: loads the table beforehand
    is_lut: bool = False
    #: whether two of every four columns have codes, in the order of `two_of_four`
    sparse: bool = False
    #: whether the bits of codes lie in `float4.PLACES`
    bit_interleaved: bool = False

    @property
    def order(self) -> str:
        """How the codes of two neighbouring words lie in them."""
        return "pairs" if self.is_lut else "spread" if self.bit_interleaved else "planes"

    @property
    def words(self) -> int:
        """Words of 16 bits that a unit takes: what assembly decodes at once."""
        return 3 if self.sparse else Packing(self.bits).words

    @property
    def planes(self) -> int:
        """Columns that a unit stands for."""
        return 16 if self.sparse else Packing(self.bits).planes

    @property
    def lut_start(self) -> int:
        """Where the LUT begins in the part `table`: at a multiple of the 16 bytes that one load brings."""
        return -(-len(self.values) // 4) * 4

    def table(self) -> Tensor:
        """The part of that name: int32, the bits of the values, and what kernels load that look them up.

        That is for bfloat16 and then for float16, each twice, so that not all threads load from one address.
        """
        values = torch.tensor(self.values, dtype=torch.float32)
        start = torch.zeros(self.lut_start, dtype=torch.int32)
        start[: len(values)] = values.view(torch.int32)
        words = [start]
        for dtype in TABLES:
            if self.is_lut:
                numbers = values.to(dtype).repeat(16 // len(values))
                words.append(table_words(numbers).repeat(2))
            if self.sparse:
                words.append(selector_words().repeat(2))
        return torch.cat(words)


@lru_cache(maxsize=256)
def format_of(dtype: DType, *, sparse: bool = False) -> Format | str:
    """How the kernels take a number format, or why they do not; `sparse`, of two of every four columns."""
    if sparse and dtype.name != "int4":
        return f"holds int4, not {dtype.name}"
    if dtype.bits > 8:
        return f"holds codes of up to 8 bits, and {dtype.name} has {dtype.bits}"
    if dtype.kind == "codebook":
        return f"has one table for all, and {dtype.name} one for each block"
    codes = codes_of(dtype)
    make = partial(Format, codes.bits, codes.flip, codes.values)
    if sparse:
        return make(0, two_of_four, sparse=True)
    if (least := _least(codes.values[: dtype.codes])) is not None:
        # zero points are near the middle
        offset = 1 << dtype.bits - 1 if dtype.kind == "int" and least == 0 else 0
        if dtype.bits < 8 or least - offset == -128:
            return make(offset, partial(integers, codes.bits, least - offset))
    if dtype.bits == 4 and (mantissa := mantissa_of(codes.values)) is not None:
        decode = partial(float4, mantissa=mantissa, least=codes.values[1])
        return make(0, decode, bit_interleaved=True)
    if dtype.bits <= 4:
        return make(0, partial(lookup, codes.bits), is_lut=True)
    if (mantissa := _mantissa(codes.values)) is not None:
        return make(0, partial(floats, codes.bits, mantissa, codes.values[1]))
    return f"has no assembly that decodes {dtype.name}"


def _least(values: tuple[float, ...]) -> int | None:
    """The first, where they are integers that count up by 1 and both elements hold all that is added up."""
    if not math.isfinite(values[0]):
        return None
    least = int(values[0])
    counts = all(value == least + code for code, value in enumerate(values))
    return least if counts and -128 <= least <= 0 else None


def _mantissa(values: tuple[float, ...]) -> int | None:
    """Bits of it, where codes are a sign, an exponent of up to 5 bits and that, by their finite values."""
    half, unit = len(values) // 2, values[1]
    if half < 2 or not unit > 0:
        return None
    digits = half.bit_length() - 1

    def value(code: int, mantissa: int) -> float:
        exponent, fraction = code >> mantissa, code & (1 << mantissa) - 1
        return unit * (fraction if exponent == 0 else (fraction + (1 << mantissa)) << exponent - 1)

    def holds(code: int, mantissa: int) -> bool:
        positive, negative = values[code], values[half + code]
        expected = value(code, mantissa)
        return not math.isfinite(positive) or (positive, negative) == (expected, -expected)

    for mantissa in range(max(digits - 5, 0), digits):
        if all(holds(code, mantissa) for code in range(half)):
            return mantissa
    return None


def known(dtype: DType, *, sparse: bool = False) -> Format:
    """The format of a weight that is stored in planes."""
    fmt = format_of(dtype, sparse=sparse)
    assert isinstance(fmt, Format)  # its layout has said that it fits
    return fmt
