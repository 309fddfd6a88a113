"""How projects pack codes into words: pure functions on tensors, each with its inverse.

Codes are uint8 (..., n), each below 2**bits. Most projects store the little-endian bit stream of
`ao_core.ext.numerics.pack_bits`, in words of some integer type; what differs has a function of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.ext import CheckpointError
from ao_core.ext.numerics import pack_bits, packed_size, unpack_bits

__all__ = [
    "AWQ_ORDER",
    "flip_sign",
    "flip_sign_",
    "pack_fractions",
    "pack_padded",
    "pack_words",
    "reorder",
    "runs",
    "swap_nibbles",
    "unpack_fractions",
    "unpack_padded",
    "unpack_words",
    "words",
]

#: the column of a group of 8 that nibble i of a word of AutoAWQ's gemm layout holds
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: elements of a run
_RUN = 1 << 18


def words(n: int, bits: int, width: int = 32) -> int:
    """Words of `width` bits that the stream of `n` codes takes."""
    return -(-n * bits // width)


def unpack_words(packed: Tensor, bits: int, n: int) -> Tensor:
    """The first `n` codes of a bit stream in words of any integer dtype, along the last dimension.

    Raises:
        CheckpointError: there are too few words.
    """
    size = packed_size(n, bits)
    data = packed.reshape(-1).view(torch.uint8).view(*packed.shape[:-1], -1)
    if 8 * data.shape[-1] < n * bits:
        raise CheckpointError(
            f"{n} codes of {bits} bits take {words(n, bits, 8)} bytes, and there are {data.shape[-1]}"
        )
    return unpack_bits(_resized(data, size), bits, n)


def _resized(data: Tensor, size: int) -> Tensor:
    """Bytes (..., n) cut or filled with zeros to (..., size); themselves where they are so."""
    if data.shape[-1] == size:
        return data
    return F.pad(data, (0, max(size - data.shape[-1], 0)))[..., :size]


def pack_words(codes: Tensor, bits: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """The bit stream of codes in words of `dtype`; the rest of the last word is 0."""
    data = pack_bits(codes, bits)
    size = words(codes.shape[-1], bits, 8 * dtype.itemsize) * dtype.itemsize
    data = _resized(data, size).contiguous()
    return data.reshape(-1).view(dtype).view(*codes.shape[:-1], -1)


def unpack_padded(packed: Tensor, bits: int, n: int) -> Tensor:
    """The first `n` codes of int32 words that hold 32 // bits codes each, and unused bits above them.

    Raises:
        CheckpointError: there are too few words.
    """
    count = 32 // bits
    if packed.shape[-1] * count < n:
        raise CheckpointError(f"{n} codes of {bits} bits need more than {packed.shape[-1]} words")
    codes = torch.empty((*packed.shape, count), dtype=torch.uint8)
    for i in range(count):
        codes[..., i] = (packed >> (bits * i)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :n].contiguous()


def pack_padded(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack_padded`."""
    count = 32 // bits
    lanes = F.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    packed = torch.zeros(lanes.shape[:-1], dtype=torch.int32)
    for i in range(count):
        packed |= lanes[..., i].to(torch.int32) << (bits * i)
    return packed


def unpack_fractions(packed: Tensor, bits: int, rows: int) -> Tensor:
    """Codes (rows, n) of which each word holds those of distant rows, the first in its highest bits.

    A word of uint8 has the codes of 8 // bits parts of all rows, one of int32 those of ten parts of 3 bits.

    Raises:
        CheckpointError: there are too few words.
    """
    count = 10 if bits == 3 else 8 // bits
    if packed.shape[0] * count < rows:
        raise CheckpointError(
            f"{rows} rows of {bits} bits need more than {packed.shape[0]} rows of words"
        )
    parts = [(packed >> (bits * (count - 1 - i))) & ((1 << bits) - 1) for i in range(count)]
    return torch.cat([part.to(torch.uint8) for part in parts])[:rows]


def pack_fractions(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack_fractions`; rows of zeros are added where the parts would differ in size."""
    count, dtype = (10, torch.int32) if bits == 3 else (8 // bits, torch.uint8)
    codes = F.pad(codes, (0, 0, 0, -codes.shape[0] % count)).to(dtype)
    packed = torch.zeros_like(codes[: codes.shape[0] // count])
    for i, part in enumerate(codes.chunk(count)):
        packed |= part << (bits * (count - 1 - i))
    return packed


def reorder(codes: Tensor, order: tuple[int, ...], *, inverse: bool = False) -> Tensor:
    """Codes whose place i of each group is that of `order[i]`; or back."""
    places = torch.tensor(order)
    places = places.argsort() if inverse else places
    found: Tensor = codes.unflatten(-1, (-1, len(order)))[..., places].flatten(-2)
    return found


def swap_nibbles(packed: Tensor) -> Tensor:
    """Bytes whose even element is in the high half, from those that have it in the low one; or back."""
    return (packed << 4) | (packed >> 4)


def flip_sign(codes: Tensor, bits: int) -> Tensor:
    """Codes q + 2**(bits - 1) of signed numbers from their two's complement; or back."""
    return codes ^ (1 << (bits - 1))


def flip_sign_(codes: Tensor, bits: int) -> Tensor:
    """`flip_sign` in place."""
    return codes.bitwise_xor_(1 << (bits - 1))


def runs(count: int, width: int) -> Iterator[slice]:
    """Rows of `width` elements, some at a time: what is computed of them takes little memory."""
    step = max(_RUN // max(width, 1), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
