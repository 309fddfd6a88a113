"""Packing codes of 1 to 8 bits into bytes: a little-endian bit stream along the last dimension."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ao_core.errors import ConfigError
from ao_core.numerics.slabs import is_large, slabs

__all__ = [
    "digits_a_byte",
    "pack_bits",
    "pack_digits",
    "pack_unit",
    "packed_size",
    "unpack_bits",
    "unpack_digits",
]


def pack_unit(bits: int) -> tuple[int, int]:
    """(values, bytes) of the smallest run of codes that fills whole bytes: 3 bits -> (8, 3).

    Raises:
        ConfigError: `bits` is not in 1 to 8.
    """
    if not 1 <= bits <= 8:
        raise ConfigError(f"bits={bits}: codes have 1 to 8 bits")
    shared = gcd(bits, 8)
    return 8 // shared, bits // shared


def packed_size(n: int, bits: int) -> int:
    """Bytes that `n` codes take; the last unit is padded."""
    values, size = pack_unit(bits)
    return -(-n // values) * size


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., n], each below 2**bits, into uint8 [..., packed_size(n, bits)].

    Code `i` occupies bits `i*bits` to `(i+1)*bits - 1` of the stream, the lowest bit of a byte
    first (for 4 bits: low nibble first). The tail is padded with zeros. For 8 bits this is `codes`
    itself.
    """
    values, size = pack_unit(bits)
    if bits == 8:
        return codes
    if not is_large(codes):
        return _pack(codes, bits)
    packed = codes.new_empty((*codes.shape[:-1], packed_size(codes.shape[-1], bits)))
    for part, units in slabs(codes.shape, (values,)):
        place = part
        if len(part) == codes.dim():  # cut within rows, too
            place = (*part[:-1], slice(units[-1].start * size, units[-1].stop * size))
        packed[place] = _pack(codes[part], bits)
    return packed


def _pack(codes: Tensor, bits: int) -> Tensor:
    values, size = pack_unit(bits)
    if tail := -codes.shape[-1] % values:
        codes = torch.nn.functional.pad(codes, (0, tail))
    lanes = [codes[..., i::values] for i in range(values)]
    packed = [
        _merge([_shift(lanes[i], bits * i - 8 * j) for i in _touched(8 * j, 8, bits)])
        for j in range(size)
    ]
    return torch.stack(packed, dim=-1).flatten(-2)


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of `pack_bits`: uint8 [..., packed_size(n, bits)] -> contiguous codes [..., n].

    Raises:
        ConfigError: `n` codes take another number of bytes.
    """
    values, size = pack_unit(bits)
    if packed.shape[-1] != packed_size(n, bits):
        raise ConfigError(
            f"n={n}: {n} codes of {bits} bits take {packed_size(n, bits)} bytes, "
            f"but the packed tensor has {packed.shape[-1]} along its last dimension"
        )
    if bits == 8:
        return packed
    if not is_large(packed):
        return _unpack(packed, bits, n)
    codes = packed.new_empty((*packed.shape[:-1], n))
    for part, units in slabs(codes.shape, (values,)):
        place = part
        if len(part) == codes.dim():  # cut within rows, too
            place = (*part[:-1], slice(units[-1].start * size, units[-1].stop * size))
        codes[part] = _unpack(packed[place], bits, codes[part].shape[-1])
    return codes


def _unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    values, size = pack_unit(bits)
    lanes = [packed[..., j::size] for j in range(size)]
    mask = (1 << bits) - 1
    codes = [
        _merge([_shift(lanes[j], 8 * j - bits * i) for j in _touched(bits * i, bits, 8)]) & mask
        for i in range(values)
    ]
    return torch.stack(codes, dim=-1).flatten(-2)[..., :n].contiguous()


def digits_a_byte(base: int) -> int:
    """How many numbers below `base` one byte holds: 5 for base 3, since 3**5 = 243.

    Raises:
        ConfigError: `base` is not in 2 to 256.
    """
    if not 2 <= base <= 256:
        raise ConfigError(f"base={base}: digits have 2 to 256 values")
    count = 1
    while base ** (count + 1) <= 256:
        count += 1
    return count


def pack_digits(codes: Tensor, base: int) -> Tensor:
    """Pack uint8 codes [..., n], each below `base`, into uint8 [..., ceil(n / digits_a_byte(base))].

    The bytes are numbers in that base, the first code the lowest digit; the tail is padded with zeros.
    """
    count = digits_a_byte(base)
    if tail := -codes.shape[-1] % count:
        codes = torch.nn.functional.pad(codes, (0, tail))
    packed = codes[..., count - 1 :: count]
    for i in reversed(range(count - 1)):
        packed = packed * base + codes[..., i::count]
    return packed.contiguous()


def unpack_digits(packed: Tensor, base: int, n: int) -> Tensor:
    """Inverse of `pack_digits`: uint8 [..., ceil(n / digits_a_byte(base))] -> contiguous codes [..., n].

    Raises:
        ConfigError: `n` digits take another number of bytes.
    """
    count = digits_a_byte(base)
    if packed.shape[-1] != -(-n // count):
        raise ConfigError(
            f"n={n}: {n} digits of base {base} take {-(-n // count)} bytes, but the packed tensor has "
            f"{packed.shape[-1]} along its last dimension"
        )
    # a base of 256 is none of uint8, in which one digit is the byte
    digits = [packed // base**i % base for i in range(count)] if count > 1 else [packed]
    return torch.stack(digits, dim=-1).flatten(-2)[..., :n].contiguous()


def _touched(start: int, length: int, width: int) -> range:
    """Numbers of the fields of `width` bits that `length` bits from `start` on touch."""
    return range(start // width, (start + length - 1) // width + 1)


def _shift(x: Tensor, left: int) -> Tensor:
    """Shift a uint8 tensor left (right when negative); bits that leave the byte are lost."""
    if left == 0:
        return x
    return x << left if left > 0 else x >> -left


def _merge(parts: list[Tensor]) -> Tensor:
    """Bitwise or of all parts."""
    merged = parts[0]
    for part in parts[1:]:
        merged = merged | part
    return merged
