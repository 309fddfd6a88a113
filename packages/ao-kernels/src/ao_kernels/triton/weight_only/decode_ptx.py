"""PTX that turns words of codes into numbers: text, which kernels hold and NumPy models run.

A register holds two neighbouring 16-bit words of a row. So every output is the pair of numbers that a plane
has in both; the registers of `Packing.words` words come as the operands behind the outputs.

- Integers come from the exponent: with the bits of a code c among those of the mantissa of 2**7 in bfloat16
  (2**10 in float16), p bits up, the number 128 + c * 2**p (1024 + …) is there at once. One `fma` divides
  and subtracts, exactly. Codes that are near each other in a word need one shift together.
- Floats come from exponent and mantissa moved into place, then a power of two.
- LUTs of up to 4 bits are looked up in registers, by byte permutations.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache

from ao_kernels.triton.shared.ptx import AND_OR, AND_XOR, SELECT, SUFFIX, block
from ao_kernels.triton.weight_only.lut_ptx import TABLE
from ao_kernels.triton.weight_only.packing import Packing

__all__ = ["floats", "integers", "lookup"]

#: bits of a mantissa
_MANTISSA = {"bf16": 7, "fp16": 10}
_BIAS = {"bf16": 127, "fp16": 15}


class _Block:
    """Lines of assembly in which nothing is computed twice."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.registers: dict[str, str] = {}

    def make(self, instruction: str) -> str:
        """The register with what an instruction gives, written as "opcode operand, operand, …"."""
        if instruction not in self.registers:
            name = self.registers[instruction] = f"t{len(self.registers)}"
            opcode, operands = instruction.split(" ", 1)
            self.lines.append(f"{opcode} {name}, {operands};")
        return self.registers[instruction]

    def shift(self, register: str, by: int) -> str:
        """To the right, or to the left where `by` is negative."""
        if by == 0:
            return register
        return self.make(f"shr.u32 {register}, {by}" if by > 0 else f"shl.b32 {register}, {-by}")

    def constant(self, value: float, element: str) -> str:
        """A number that the element holds, in both halves."""
        return self.make(f"mov.b32 {_twice(_bits(value, element))}")

    def put(self, output: int, instruction: str) -> None:
        """An instruction whose result is an output."""
        opcode, operands = instruction.split(" ", 1)
        self.lines.append(f"{opcode} ${output}, {operands};")

    def text(self) -> str:
        """The block, with all registers declared."""
        declared = f".reg .b32 {', '.join(self.registers.values())};"
        return block([declared, *self.lines] if self.registers else self.lines)


#: writes what the codes of a register are, in the order of their containers, to outputs from the given one on
_Decoder = Callable[[_Block, str, int], None]


def _decode(bits: int, decoder: _Decoder) -> str:
    """All codes of a unit; those left over are first put together in registers of their own."""
    packing, out = Packing(bits), _Block()
    per = 16 // packing.container
    for number in range(packing.planes // per):
        if number < packing.words:
            register = f"${packing.planes + number}"
        else:
            register = _left_over(out, packing, number - packing.words)
        decoder(out, register, number * per)
    return out.text()


def _left_over(out: _Block, packing: Packing, index: int) -> str:
    found = None
    for word, source, target, size in packing.pieces(index):
        moved = out.shift(f"${packing.planes + word}", source - target)
        mask = _everywhere((1 << size) - 1 << target, packing.container)
        if found is None:
            found = out.make(f"and.b32 {moved}, {mask}")
        else:
            found = out.make(f"lop3.b32 {moved}, {mask}, {found}, {AND_OR}")
    assert found is not None
    return found


@lru_cache
def integers(bits: int, least: int, element: str) -> str:
    """Planes of code + `least`; of 8 bits, which bfloat16 does not have room for, code - 128."""
    room = _MANTISSA[element]
    container = Packing(bits).container

    def decoder(out: _Block, register: str, first: int) -> None:
        base = 0
        for j, low in enumerate(range(0, 16, container)):
            if low + bits > base + room:
                base = low
            up = low - base
            moved = out.shift(register, base)
            mask = _twice((1 << min(bits, room)) - 1 << up)
            magic = _twice(_bits(2.0**room, element))
            found = out.make(f"lop3.b32 {moved}, {mask}, {magic}, {AND_OR}")
            if bits > room:
                # 128 + seven bits, less 256, or less 128 where the eighth is set
                assert (bits, least) == (8, -128)
                top = out.make(f"lop3.b32 {moved}, 0x00800080, 0x43804380, {AND_XOR}")
                factor, offset = top, found
                found = out.constant(-1, element)
            else:
                factor = out.constant(2.0**-up, element)
                offset = out.constant(least - 2.0 ** (room - up), element)
            out.put(first + j, f"fma.rn.{SUFFIX[element]} {found}, {factor}, {offset}")

    return _decode(bits, decoder)


@lru_cache
def floats(bits: int, mantissa: int, unit: float, element: str) -> str:
    """Planes of numbers with a sign, an exponent and bits of a mantissa; `unit` is the value of code 1.

    Infinities and NaN become the finite numbers that their exponents stand for, but of e5m2 in float16.
    Quantizing them gives a block the scale NaN, or the largest that there is.
    """
    room = _MANTISSA[element]
    container = Packing(bits).container
    place = room - mantissa
    digits = (1 << bits - 1) - 1 << place
    factor = unit * 2.0 ** (_BIAS[element] - 1 + mantissa)

    def decoder(out: _Block, register: str, first: int) -> None:
        for j, low in enumerate(range(0, 16, container)):
            signed = out.shift(register, low + bits - 16)
            moved = out.shift(register, low - place)
            if signed == moved:
                found = f"and.b32 {moved}, {_twice(0x8000 | digits)}"
            else:
                part = out.make(f"and.b32 {moved}, {_twice(digits)}")
                found = f"lop3.b32 {signed}, 0x80008000, {part}, {AND_OR}"
            if factor == 1:
                out.put(first + j, found)
            else:  # -0 keeps the sign of 0
                power, zero_point = out.constant(factor, element), out.constant(-0.0, element)
                product = f"{out.make(found)}, {power}, {zero_point}"
                out.put(first + j, f"fma.rn.{SUFFIX[element]} {product}")

    return _decode(bits, decoder)


@lru_cache
def lookup(bits: int, element: str) -> str:
    """Planes of the values in the table, rounded to nearest, for codes of up to 4 bits.

    The words are those of `words.interleave`: nibbles 2j and 2j + 1 of a register are of the same planes.

    `prmt` picks four bytes out of eight by the lower three bits of four codes; done for the lower and the
    upper bytes of the values; where codes have a fourth bit for either half of them, of which that selects.
    """
    container = Packing(bits).container
    count = 4 // container
    low_table, high_table = TABLE[:4], TABLE[4:]

    def decoder(out: _Block, register: str, first: int) -> None:
        for part in range(count):
            moved = out.shift(register, container * part)
            lower = _everywhere((1 << min(bits, 3)) - 1, 4)
            codes = out.make(f"and.b32 {moved}, {lower}")
            for half, order in enumerate(("0xd9c8", "0xfbea")):
                chosen = out.shift(codes, 16 * half)
                low, high = (
                    out.make(f"prmt.b32 {table[0]}, {table[1]}, {chosen}")
                    for table in (low_table, high_table)
                )
                if bits == 4:
                    # bytes of all ones where the fourth bit is set: that of nibble 0 is shifted to the sign
                    # of byte 0, …
                    mask = out.make(f"prmt.b32 {out.shift(moved, -4)}, {moved}, {order}")
                    others = (
                        out.make(f"prmt.b32 {table[2]}, {table[3]}, {chosen}")
                        for table in (low_table, high_table)
                    )
                    low, high = (
                        out.make(f"lop3.b32 {other}, {mask}, {picked}, {SELECT}")
                        for other, picked in zip(others, (low, high), strict=True)
                    )
                for pair, both in enumerate(("0x5140", "0x7362")):
                    nibble = 2 * half + pair
                    out.put(first + nibble * count + part, f"prmt.b32 {low}, {high}, {both}")

    return _decode(bits, decoder)


def _bits(value: float, element: str) -> int:
    """The 16 bits of a number; raises where the element does not hold it."""
    kind = "<f" if element == "bf16" else "<e"
    data = struct.pack(kind, value)
    if struct.unpack(kind, data)[0] != value or any(data[:-2]):
        raise ValueError(f"value={value}: {element} does not hold it")
    return int.from_bytes(data[-2:], "little")


def _twice(half: int) -> str:
    return f"{half << 16 | half:#010x}"


def _everywhere(mask: int, container: int) -> str:
    """A mask of a container in all of a register."""
    return f"{sum(mask << low for low in range(0, 32, container)):#010x}"
