"""Which number formats the kernels of `plane16` know, and how."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core.records import DType
from ao_kernels.cpu.codes import codes_of
from ao_kernels.triton import assembly
from ao_kernels.triton.float4 import float4, mantissa_of

__all__ = ["TABLES", "Format", "format_of", "known"]

#: dtypes of the activations in the order of their tables in the part `table`
TABLES = (torch.bfloat16, torch.float16)


class Format(NamedTuple):
    """A number format as it is stored, and as products take it."""

    bits: int
    #: exclusive or with it turns a canonical code into the stored one and back
    flip: int
    #: of each stored code, exact in float32
    values: tuple[float, ...]
    #: products are with values less this, which zero points make up for
    offset: int
    #: "bf16" or "fp16" → the text that turns words into such numbers
    assembly: Callable[[str], str]
    #: whether they are looked up: then codes are stored in pairs (`assembly.lookup`), and the kernel
    #: loads the table beforehand
    looked_up: bool = False
    #: whether two of every four columns have codes, in the order of `assembly.two_of_four`
    sparse: bool = False
    #: whether the bits of codes lie in `float4.PLACES`
    spread: bool = False

    @property
    def order(self) -> str:
        """How the codes of two neighbouring words lie in them."""
        return "pairs" if self.looked_up else "spread" if self.spread else "planes"

    @property
    def planes(self) -> int:
        """Columns that an element of a tile stands for: codes in a word of 16 bits, or in three of them."""
        return 16 if self.sparse else 16 // self.bits

    def table(self) -> Tensor:
        """The part of that name: int32, the bits of the values, and what kernels load that look them up.

        That is for bfloat16 and then for float16, each twice, so that not all threads load from one address.
        """
        values = torch.tensor(self.values, dtype=torch.float32)
        words = []
        for dtype in TABLES:
            if self.looked_up:
                words.append(assembly.table_words(values.to(dtype)).repeat(2))
            if self.sparse:
                words.append(assembly.selector_words().repeat(2))
        return torch.cat([values.view(torch.int32), *words])


def format_of(dtype: DType, *, sparse: bool = False) -> Format | str:
    """How the kernels take a number format, or why they do not; `sparse`, of two of every four columns."""
    if sparse and dtype.name != "int4":
        return f"holds int4, not {dtype.name}"
    if dtype.bits not in (4, 8):
        return f"holds codes of 4 and 8 bits, and {dtype.name} has {dtype.bits}"
    if dtype.kind == "table":
        return f"has one table for all, and {dtype.name} one for each block"
    codes = codes_of(dtype)
    make = partial(Format, codes.bits, codes.flip, codes.values)
    if dtype.name == "uint4":
        return make(8, assembly.nibbles)
    if sparse:
        return make(0, assembly.two_of_four, sparse=True)
    if dtype.name == "int4":
        return make(0, assembly.nibbles)
    if dtype.name == "int8":
        return make(0, assembly.integers)
    if dtype.name == "f8e4m3":
        return make(0, assembly.e4m3)
    mantissa = mantissa_of(codes.values) if dtype.bits == 4 else None
    if mantissa is not None:
        decode = partial(float4, mantissa=mantissa, least=codes.values[1])
        return make(0, decode, spread=True)
    if dtype.bits == 4:
        return make(0, assembly.lookup, looked_up=True)
    return f"has no assembly that decodes {dtype.name}"


def known(dtype: DType, *, sparse: bool = False) -> Format:
    """The format of a weight that is stored in planes."""
    fmt = format_of(dtype, sparse=sparse)
    assert isinstance(fmt, Format)  # its layout has said that it fits
    return fmt
