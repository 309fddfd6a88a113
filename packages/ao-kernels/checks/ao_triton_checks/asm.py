"""Inline assembly run by NumPy: the very text that a kernel holds, over as many inputs as there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["run"]

Words = npt.NDArray[np.uint32]

_UNPACKED = re.compile(r"mov.b32\s+\{(?P<low>\w+), (?P<high>\w+)\}, (?P<word>\S+)")
_STATEMENT = re.compile(r"(?P<op>[a-z][\w.]*)\s+(?P<operands>.*)", re.DOTALL)


def run(text: str, *inputs: Words, given: Mapping[str, Words] | None = None) -> tuple[Words, ...]:
    """What a block of PTX writes to its outputs, for 32-bit inputs of one shape.

    `$0`, `$1`, … are the outputs, in the order of their numbers, and after them the inputs, as in
    `triton.language.inline_asm_elementwise`; `given` holds registers of the kernel around the block. Where
    an input is an address, what stands there is given in its place.
    An output that is read before it is written, an opcode that is not known here, and a sum that float64
    does not hold exactly raise.
    """
    numbers = {int(number) for number in re.findall(r"\$(\d+)", text)}
    outputs = max(numbers) + 1 - len(inputs)
    registers: dict[str, Words] = {
        **(given or {}),
        **{f"${outputs + i}": np.asarray(values, np.uint32) for i, values in enumerate(inputs)},
    }
    for statement in text.strip().strip("{}").split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        if unpacked := _UNPACKED.fullmatch(statement):
            word = _operand(unpacked["word"], registers)
            registers[unpacked["low"]] = word & np.uint32(0xFFFF)
            registers[unpacked["high"]] = word >> np.uint32(16)
            continue
        match = _STATEMENT.fullmatch(statement)
        if match is None or match["op"] not in _OPS:
            raise NotImplementedError(f"no model of {statement!r}")
        target, *sources = (operand.strip() for operand in match["operands"].split(","))
        values = [_operand(source, registers) for source in sources]
        with np.errstate(over="ignore"):
            registers[target] = np.asarray(_OPS[match["op"]](*values), np.uint32)
    shape = np.broadcast_shapes(*(np.shape(values) for values in inputs))
    return tuple(np.broadcast_to(registers[f"${i}"], shape) for i in range(outputs))


def _operand(text: str, registers: dict[str, Words]) -> Words:
    text = text.strip("{}[]")  # of a pair of 16-bit registers, and of an address
    if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text):
        return np.asarray(int(text, 0), np.uint32)
    return registers[text]


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit by bit, entry 4a + 2b + c of the table."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for entry in range(8):
        if int(table) >> entry & 1:
            chosen = [x if entry >> 2 - i & 1 else ~x for i, x in enumerate((a, b, c))]
            out |= chosen[0] & chosen[1] & chosen[2]
    return out


def _prmt(a: Words, b: Words, selectors: Words) -> Words:
    """Byte i of the result: the byte of {b, a} that nibble i names, or with bit 3 its sign, 8 times."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros(np.broadcast_shapes(both.shape, selectors.shape), np.uint32)
    for i in range(4):
        nibble = selectors >> np.uint32(4 * i) & np.uint32(15)
        place = ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
        byte = (both >> place & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte >> np.uint32(7) == 1, np.uint32(255), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return out


def _halves(kind: str) -> Callable[..., Words]:
    """`fma.rn` of both 16-bit halves."""

    def fma(a: Words, b: Words, c: Words) -> Words:
        out = []
        for shift in (0, 16):
            x, y, z = (_decode(v >> np.uint32(shift) & np.uint32(0xFFFF), kind) for v in (a, b, c))
            with np.errstate(invalid="ignore", over="ignore"):
                out.append(_encode(_exact_sum(x * y, z), kind) << np.uint32(shift))
        return out[0] | out[1]

    return fma


def _exact_sum(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A + b; raises where it is rounded, since rounding it again would then not be what `fma` does."""
    total, error = _two_sum(a, b)
    if error.any():
        raise NotImplementedError("a sum that float64 does not hold exactly")
    return total


def _two_sum(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A + b rounded, and what the exact sum has beside it."""
    with np.errstate(invalid="ignore"):
        total = a + b
        finite = np.isfinite(total)
        part = np.where(finite, total - a, 0)
        return total, np.where(finite, (a - (total - part)) + (b - part), 0)


def _fma_float32(a: Words, b: Words, c: Words) -> Words:
    """Rounded once: the sum in float64 is first rounded to the odd one of its two neighbours."""
    x, y, z = (np.atleast_1d(v).view(np.float32).astype(np.float64) for v in (a, b, c))
    with np.errstate(invalid="ignore"):
        total, error = _two_sum(x * y, z)
    even = total.view(np.int64) & 1 == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    with np.errstate(over="ignore", under="ignore"):
        return odd.astype(np.float32).view(np.uint32)


def _sum_float32(a: Words, b: Words) -> Words:
    x, y = (np.atleast_1d(v).view(np.float32) for v in (a, b))
    with np.errstate(all="ignore"):
        return (x + y).view(np.uint32)


def _product_float32(a: Words, b: Words) -> Words:
    x, y = (np.atleast_1d(v).view(np.float32) for v in (a, b))
    with np.errstate(all="ignore"):
        return (x * y).view(np.uint32)


def _least_magnitude(a: Words, b: Words) -> Words:
    """The lesser magnitude, with the product of the signs; NaN if one is."""
    sign, magnitude = np.uint32(1 << 31), np.uint32((1 << 31) - 1)
    nan = np.maximum(a & magnitude, b & magnitude) > 0x7F800000
    least = np.minimum(a & magnitude, b & magnitude) | (a ^ b) & sign
    return np.where(nan, np.uint32(0x7FFFFFFF), least)


def _extreme(of_two: np.ufunc) -> Callable[..., Words]:
    """One of two numbers; NaN if one is, as NumPy has it."""

    def extreme(a: Words, b: Words) -> Words:
        found: npt.NDArray[np.float32] = of_two(
            *(np.atleast_1d(v).view(np.float32) for v in (a, b))
        )
        return np.where(np.isnan(found), np.uint32(0x7FFFFFFF), found.view(np.uint32))

    return extreme


def _pair(kind: str) -> Callable[..., Words]:
    """Two numbers of 16 bits, the first in the upper half."""

    def pair(high: Words, low: Words) -> Words:
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = (np.atleast_1d(v).view(np.float32).astype(np.float64) for v in (high, low))
            return _encode(x, kind) << np.uint32(16) | _encode(y, kind)

    return pair


def _pair_of_float8(mbits: int, least: int, quant_max: float) -> Callable[..., Words]:
    """Codes of two numbers, the first in the upper byte; `least` is the exponent of the least normal one."""

    def code(words: Words) -> Words:
        with np.errstate(invalid="ignore"):
            values = np.atleast_1d(words).view(np.float32).astype(np.float64)
        magnitude = np.minimum(np.abs(np.nan_to_num(values)), quant_max)
        exponent = np.where(magnitude == 0, least, np.frexp(magnitude)[1] - 1)
        exponent = np.maximum(exponent, least)
        steps = np.rint(np.ldexp(magnitude, mbits - exponent)).astype(np.uint32)
        found = steps + ((exponent - least).astype(np.uint32) << np.uint32(mbits))
        found |= np.signbit(values).astype(np.uint32) << np.uint32(7)
        return np.where(np.isnan(values), np.uint32(127), found)

    return lambda high, low: code(high) << np.uint32(8) | code(low)


def _halves_of_float8(codes: Words) -> Words:
    """Two e4m3 codes of 16 bits in all as two float16 numbers, the lower one in the lower half."""
    out = np.zeros(np.shape(codes), np.uint32)
    for half in range(2):
        code = codes >> np.uint32(8 * half) & np.uint32(255)
        # moved into place, it is 2**-8 of the number
        moved = ((code & np.uint32(127)) << np.uint32(7)).astype(np.uint16).view(np.float16)
        number = np.where(code & 127 == 127, np.float16("nan"), moved * np.float16(256))
        sign = (code >> np.uint32(7)) << np.uint32(15)
        out |= (number.view(np.uint16).astype(np.uint32) | sign) << np.uint32(16 * half)
    return out


def _decode(codes: Words, kind: str) -> npt.NDArray[np.float64]:
    if kind == "f16":
        return codes.astype(np.uint16).view(np.float16).astype(np.float64)
    return (codes << np.uint32(16)).view(np.float32).astype(np.float64)


def _encode(values: npt.NDArray[np.float64], kind: str) -> Words:
    """Rounded to nearest, ties to even."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    exponent = np.maximum(np.frexp(values)[1] - 8, -133)
    step = np.ldexp(1.0, exponent)
    rounded = np.where(np.isfinite(values), np.rint(values / step) * step, values)
    return rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)


_OPS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda low, *high: low | high[0] << np.uint32(16) if high else low,
    "ld.global.nc.u8": lambda word: word & np.uint32(0xFF),
    "ld.global.nc.u16": lambda word: word & np.uint32(0xFFFF),
    "ld.global.nc.b32": lambda word: word,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "shf.l.wrap.b32": lambda low, high, n: high << n | (low >> 1) >> (np.uint32(31) - n),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _halves("bf16"),
    "fma.rn.f16x2": _halves("f16"),
    "add.s32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "add.rn.f32": _sum_float32,
    "fma.rn.f32": _fma_float32,
    "mul.rn.f32": _product_float32,
    "neg.f32": lambda a: a ^ np.uint32(1 << 31),
    "min.NaN.xorsign.abs.f32": _least_magnitude,
    "min.NaN.f32": _extreme(np.minimum),
    "max.NaN.f32": _extreme(np.maximum),
    "cvt.rn.bf16x2.f32": _pair("bf16"),
    "cvt.rn.f16x2.f32": _pair("f16"),
    "cvt.f32.f16": lambda half: _decode(half, "f16").astype(np.float32).view(np.uint32),
    "cvt.rn.f16x2.e4m3x2": _halves_of_float8,
    "cvt.rn.satfinite.e4m3x2.f32": _pair_of_float8(3, -6, 448.0),
    "cvt.rn.satfinite.e5m2x2.f32": _pair_of_float8(2, -14, 57344.0),
}
