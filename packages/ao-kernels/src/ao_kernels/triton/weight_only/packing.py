"""How codes of 1 to 8 bits lie in words of 16 bits: the rule that layouts, assembly and kernels share.

A word is cut into containers of 1, 2, 4 or 8 bits, the narrowest that hold a code, and each has a whole
code in its lowest bits. Where codes have 3, 5, 6 or 7 bits the containers have bits left over: those of the
same container of all words, one word after the other, are a stream of further codes. So as many words as
bits, over what both share with 16, hold codes without a gap:

====  ======  ==========  =====  ==================
bits  words   containers  codes  of which left over
====  ======  ==========  =====  ==================
1     1       16 of 1     16     0
2     1       8 of 2      8      0
3     3       4 of 4      16     4
4     1       4 of 4      4      0
5     5       2 of 8      16     6
6     3       2 of 8      8      2
7     7       2 of 8      16     2
8     1       2 of 8      2      0
====  ======  ==========  =====  ==================

Whatever is done to a container is done to all of a register at once, with what is left over too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core.ext.numerics import pack_bits, unpack_bits

__all__ = ["Packing", "Piece", "interleave", "pack_words", "separate", "unpack_words"]


class Piece(NamedTuple):
    """Bits that are left over in the containers of a word: part of a code."""

    word: int
    #: the lowest bit in the container, and where it is in the code; how many bits
    source: int
    target: int
    size: int


class Packing(NamedTuple):
    """The words that codes of so many bits fill."""

    bits: int

    @property
    def words(self) -> int:
        """Words of a unit."""
        return self.bits // math.gcd(self.bits, 16)

    @property
    def planes(self) -> int:
        """Codes of a unit: those of word 0, of word 1, …, then what is left over."""
        return 16 // math.gcd(self.bits, 16)

    @property
    def container(self) -> int:
        """Bits of a container."""
        return 1 << (self.bits - 1).bit_length()

    @property
    def rest(self) -> int:
        """Bits of a container that its code leaves over."""
        return self.container - self.bits

    def pieces(self, index: int) -> list[Piece]:
        """Of what the `index`-th code left over in each container is made."""
        first, found = index * self.bits, []
        for word in range(self.words):
            low = max(first, word * self.rest)
            high = min(first + self.bits, (word + 1) * self.rest)
            if low < high:
                source = self.bits + low - word * self.rest
                found.append(Piece(word, source, low - first, high - low))
        return found


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 […, planes], each below 2**bits, as words int16 […, words]."""
    packing = Packing(bits)
    per = 16 // packing.container
    grid = codes.contiguous().view(*codes.shape[:-1], -1, per)
    filled = grid[..., : packing.words, :]
    if packing.rest:
        filled = filled.clone()
        for index in range(grid.shape[-2] - packing.words):
            code = grid[..., packing.words + index, :]
            for word, source, target, size in packing.pieces(index):
                filled[..., word, :] |= (code >> target & (1 << size) - 1) << source
    return pack_bits(filled.flatten(-2), packing.container).view(torch.int16)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_words`."""
    packing = Packing(bits)
    per = 16 // packing.container
    held = packing.words * per
    filled = unpack_bits(_bytes(words), packing.container, held)
    grid = filled.view(*words.shape[:-1], packing.words, per)
    codes = [grid & (1 << bits) - 1]
    for index in range(packing.planes // per - packing.words):
        code = torch.zeros_like(grid[..., 0, :])
        for word, source, target, size in packing.pieces(index):
            code |= (grid[..., word, :] >> source & (1 << size) - 1) << target
        codes.append(code.unsqueeze(-2))
    return torch.cat(codes, -2).flatten(-2)


def interleave(words: Tensor) -> Tensor:
    """Words int16 […, n] of which each two neighbours share their nibbles, in turns."""
    nibbles = unpack_bits(_bytes(words), 4, 4 * words.shape[-1])
    pairs = nibbles.view(*words.shape[:-1], -1, 2, 4).transpose(-1, -2)
    return pack_bits(pairs.reshape(nibbles.shape), 4).view(torch.int16)


def separate(words: Tensor) -> Tensor:
    """Inverse of `interleave`."""
    nibbles = unpack_bits(_bytes(words), 4, 4 * words.shape[-1])
    pairs = nibbles.view(*words.shape[:-1], -1, 4, 2).transpose(-1, -2)
    return pack_bits(pairs.reshape(nibbles.shape), 4).view(torch.int16)


def _bytes(words: Tensor) -> Tensor:
    """Words int16 […, n] as bytes […, 2n]; `contiguous` would leave the stride of a single word as it is."""
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], 2 * words.shape[-1])
