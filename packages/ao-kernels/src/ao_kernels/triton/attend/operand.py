"""How the kernel reads keys or values of a format, or why it does not."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core import WHOLE, Spec
from ao_core.ext import registry
from ao_core.ext.numerics import hadamard_factors, hadamard_scales
from ao_kernels.triton.shared.ptx import multiply_add
from ao_kernels.triton.weight_only.formats import Format, format_of

__all__ = ["BLOCK_N", "Operand", "operand", "table_of"]

#: tokens that a CTA reads at a time at most: those of one, or of a part of one, block of channel scales
BLOCK_N = 64
#: elements of the longest keys and values: the sums of a row are in registers
_GREATEST_HEAD = 128
#: words of a group at least: a product of matrices has so many rows and columns
_FEWEST_WORDS = 16
#: columns of a product that warps share
_FEWEST_COLUMNS = 32
_SCALES = ("float32", "bfloat16", "float16")


class Operand(NamedTuple):
    """Keys or values as the kernel is compiled for them."""

    dim: int
    #: elements of a token, and tokens, that share a scale; `channels`: each element has its own
    group: int
    tokens: int
    channels: bool
    #: codes in a word of 16 bits
    planes: int
    #: exclusive or with a word, as a signed one, before its codes are decoded
    flip: int
    #: numbers are decoded less this
    offset: int
    #: (rounds, before, after) of the Hadamard transform of stored elements, or None
    rotation: tuple[int, float, float] | None
    #: of the format, in the registry
    numbers: str

    def constants(self, prefix: str, element: str | None) -> dict[str, Any]:
        """The compile-time arguments of the kernel, for assembly that makes such elements, or without."""
        found: dict[str, Any] = {
            "DIM": self.dim,
            "GROUP": self.group,
            "TOKENS": self.tokens,
            "PLANES": self.planes,
            "FLIP": self.flip,
            "OFFSET": self.offset,
            "ASM": None if element is None else _known(self.numbers).assembly(element),
            "ROTATION": self.rotation,
        }
        if prefix == "K":
            found["CHANNELS"] = self.channels
            found["FMA"] = None if element is None else multiply_add(element)
        else:
            # narrow planes are one product: warps share its columns, and of few they would all have each
            narrow = self.group // self.planes < _FEWEST_COLUMNS
            found["PIECES"] = 1 if narrow else self.planes
        return {f"{prefix}_{name}": value for name, value in found.items()}


@lru_cache(maxsize=256)
def operand(spec: Spec, dim: int, memory: int) -> Operand | str:
    """How keys or values of `dim` elements, with memory for so many tokens, are read, or why they are not."""
    if spec.layout not in ("plain", "packed"):
        return f"reads the layouts plain and packed, not {spec.layout}"
    dtype = registry.dtypes.get(spec.dtype)
    fmt = format_of(dtype)
    if isinstance(fmt, str) or fmt.is_lut or fmt.bit_interleaved or fmt.bits not in (4, 8):
        return f"decodes integers of 4 and 8 bits and floats of 8, not {spec.dtype}"
    if spec.layout == "plain" and fmt.bits != 8:
        return f"reads {spec.dtype} in the layout packed, found plain"
    if spec.scale_dtype not in _SCALES:
        return f"takes scales in {', '.join(_SCALES)}, found {spec.scale_dtype}"
    if spec.zero_point == "offset":
        return "takes zero points off before scaling, and this format has offsets"
    planes = 16 // fmt.bits
    if dim > _GREATEST_HEAD or dim % planes:
        return (
            f"takes heads of {_GREATEST_HEAD} elements at most, in words of {planes}, found {dim}"
        )
    if len(spec.block) > 2:
        return f"needs scales of one head each, found blocks of {spec.block}"
    tokens, group = (memory if each == WHOLE else each for each in (1, *spec.block)[-2:])
    if spec.block[-1] == WHOLE or group > dim:
        group = dim
    channels = group == 1 and dim > 1
    if channels and tokens % BLOCK_N and tokens < memory:
        return f"takes scales of channels of multiples of {BLOCK_N} tokens, found {tokens}"
    if channels or group == dim:
        group = max(1 << (dim - 1).bit_length(), _FEWEST_WORDS * planes)
    elif group % planes or group & (group - 1) or group < _FEWEST_WORDS * planes:
        fewest = _FEWEST_WORDS * planes
        return f"takes groups of {fewest} or of a greater power of two, found {group}"
    rotation = _rotation(spec, dim)
    if isinstance(rotation, str):
        return rotation
    word = sum(fmt.flip << fmt.bits * j for j in range(planes))
    signed = word - (1 << 16) if word >> 15 else word
    return Operand(dim, group, tokens, channels, planes, signed, fmt.offset, rotation, spec.dtype)


def _rotation(spec: Spec, dim: int) -> tuple[int, float, float] | str | None:
    if not spec.input:
        return None
    kinds = " and ".join(map(str, spec.input))
    if len(spec.input) > 1 or spec.input[0].kind != "hadamard":
        return f"takes one Hadamard transform, found {kinds}"
    block = spec.input[0].block
    if len(hadamard_factors(block)) > 1:
        return f"takes Hadamard transforms of powers of two, found {kinds}"
    return (block.bit_length() - 1, *hadamard_scales(block))


def _known(numbers: str) -> Format:
    fmt = format_of(registry.dtypes.get(numbers))
    assert isinstance(fmt, Format)  # `operand` has asked
    return fmt


@lru_cache(maxsize=32)
def table_of(numbers: str, device: torch.device) -> Tensor:
    """What each code stands for, for the kernel without assembly."""
    return torch.tensor(_known(numbers).values, dtype=torch.float32, device=device)
