"""The bytes of a GGUF file and the parts of a `QTensor`: the same bits, in another order.

Both ways are one permutation of the bits of a block, read off a description of where ggml puts those of each
number. Some bits are inverted besides: ggml stores signed codes with an offset, and adds a minimum where ao
takes a zero point off.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import CheckpointError, Parts, registry
from ao_quant.configs.gguf import FILE_TYPES, gguf_spec

__all__ = ["block_size", "from_blocks", "kind_of", "to_blocks"]

#: storage of scales that are numbers
_SCALES = {"float16": torch.float16, "e8m0": torch.float8_e8m0fnu}
#: bytes moved at a time
_BYTES = 1 << 20
#: places of the bits of a number in a block, from its lowest; place 0 is the lowest bit of byte 0
Number = tuple[int, ...]


class Field(NamedTuple):
    """A part of a block: numbers in the order of elements, and whether their highest bits are inverted."""

    numbers: list[Number]
    inverted: bool = False


def _half(at: int) -> list[Number]:
    """The float16 number at byte `at`."""
    return [tuple(range(8 * at, 8 * at + 16))]


def _planes(at: int, count: int, width: int, bits: int) -> list[Number]:
    """Numbers from byte `at` on: one in the low end of each of `width` bytes, then those above them."""
    numbers = []
    for i in range(count):
        turn, inside = divmod(i, width * (8 // bits))
        above, byte = divmod(inside, width)
        low = 8 * (at + turn * width + byte) + above * bits
        numbers.append(tuple(range(low, low + bits)))
    return numbers


def _joined(low: list[Number], high: list[Number]) -> list[Number]:
    """Numbers whose bits are in two places."""
    return [a + b for a, b in zip(low, high, strict=True)]


def _six_bits(first: int, last: list[Number]) -> list[Number]:
    """8 scales or minima of q4_k: four in bytes, and four in `last` and the high ends of these bytes."""
    bytes_ = _planes(first, 4, 1, 8)
    return [bits[:6] for bits in bytes_] + _joined(last, [bits[6:] for bits in bytes_])


@cache
def _fields() -> dict[str, dict[str, Field]]:
    """GGUF type -> the plain parts of a tensor (see `QTensor.leaves`) and where a block has them."""
    nibbles = _planes(12, 8, 4, 4)
    scales_of_k = {
        "scale.scale": Field(_half(0)),
        "zero_point.scale": Field(_half(2)),
        "scale.qdata": Field(_six_bits(4, nibbles[:4])),
        "zero_point.qdata": Field(_six_bits(8, nibbles[4:])),
    }
    return {
        "q4_0": {"qdata": Field(_planes(2, 32, 16, 4), True), "scale": Field(_half(0))},
        "q4_1": {
            "qdata": Field(_planes(4, 32, 16, 4)),
            "scale": Field(_half(0)),
            "zero_point": Field(_half(2), True),
        },
        "q5_0": {
            "qdata": Field(_joined(_planes(6, 32, 16, 4), _planes(2, 32, 1, 1)), True),
            "scale": Field(_half(0)),
        },
        "q5_1": {
            "qdata": Field(_joined(_planes(8, 32, 16, 4), _planes(4, 32, 1, 1))),
            "scale": Field(_half(0)),
            "zero_point": Field(_half(2), True),
        },
        "q8_0": {"qdata": Field(_planes(2, 32, 32, 8)), "scale": Field(_half(0))},
        "q2_k": {
            "qdata": Field(_planes(16, 256, 32, 2)),
            "scale.qdata": Field(_planes(0, 32, 16, 4)[:16]),
            "scale.scale": Field(_half(80)),
            "zero_point.qdata": Field(_planes(0, 32, 16, 4)[16:]),
            "zero_point.scale": Field(_half(82)),
        },
        "q3_k": {
            "qdata": Field(_joined(_planes(32, 256, 32, 2), _planes(0, 256, 32, 1)), True),
            "scale.qdata": Field(_joined(_planes(96, 16, 8, 4), _planes(104, 16, 4, 2)), True),
            "scale.scale": Field(_half(108)),
        },
        "q4_k": {"qdata": Field(_planes(16, 256, 32, 4)), **scales_of_k},
        "q5_k": {
            "qdata": Field(_joined(_planes(48, 256, 32, 4), _planes(16, 256, 32, 1))),
            **scales_of_k,
        },
        "q6_k": {
            "qdata": Field(_joined(_planes(0, 256, 64, 4), _planes(128, 256, 32, 2)), True),
            "scale.qdata": Field(_planes(192, 16, 16, 8)),
            "scale.scale": Field(_half(208)),
        },
        "iq4_nl": {"qdata": Field(_planes(2, 32, 16, 4)), "scale": Field(_half(0))},
        "mxfp4": {"qdata": Field(_planes(1, 32, 16, 4)), "scale": Field(_planes(0, 1, 1, 8))},
    }


# -- moving bits -----------------------------------------------------------------------------------


class Moves(NamedTuple):
    """Bytes from the bits of others: the or of some bytes, shifted and masked, and bits that are inverted."""

    #: of each term: (bytes taken, shifts to the right, then to the left, masks), one for each new byte
    terms: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]
    inverted: Tensor


def _moves(source: list[int], inverted: list[bool]) -> Moves:
    """Where the bits of new bytes come from, and whether they are inverted on the way."""
    runs: list[list[list[int]]] = [[] for _ in range(len(source) // 8)]
    for place, origin in enumerate(source):
        here, (byte, bit), to = runs[place // 8], divmod(origin, 8), place % 8
        if here and here[-1][0] == byte and here[-1][1] == bit - to:
            here[-1][2] |= 1 << to
        else:
            here.append([byte, bit - to, 1 << to])
    terms = []
    for i in range(max(map(len, runs))):
        term = torch.tensor([run[i] if i < len(run) else [0, 0, 0] for run in runs])
        taken, (shift, mask) = term[:, 0], term[:, 1:, None].unbind(1)
        right, left = shift.clamp(min=0).to(torch.uint8), shift.neg().clamp(min=0).to(torch.uint8)
        terms.append((taken, right, left, mask.to(torch.uint8)))
    bits = torch.tensor(inverted).reshape(-1, 8).to(torch.uint8)
    flips = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, keepdim=True).to(torch.uint8)
    return Moves(tuple(terms), flips)


@cache
def _both_ways(kind: str) -> tuple[Moves, Moves]:
    """From a block to the bytes of all its parts, one part after the other, and back."""
    source: list[int] = []
    inverted: list[bool] = []
    for field in _fields()[kind].values():
        for number in field.numbers:
            source += number
            inverted += [False] * (len(number) - 1) + [field.inverted]
    back = sorted(range(len(source)), key=source.__getitem__)
    return _moves(source, inverted), _moves(back, [inverted[place] for place in back])


def _move(x: Tensor, moves: Moves) -> Tensor:
    """New bytes (B, n) from the bytes (B, n) of as many blocks."""
    out = torch.empty_like(x)
    step = max(_BYTES // x.shape[1], 1)
    for start in range(0, x.shape[0], step):
        # the same byte of all blocks together, so that whole rows are moved and shifted alike
        old = x[start : start + step].t().contiguous()
        new = moves.inverted.expand_as(old).clone()
        for byte, right, left, mask in moves.terms:
            new ^= old.index_select(0, byte) >> right << left & mask
        out[start : start + step] = new.t()
    return out


# -- tensors ---------------------------------------------------------------------------------------


def block_size(kind: str) -> tuple[int, int]:
    """(elements, bytes) of a block."""
    return len(_fields()[kind]["qdata"].numbers), sum(_part_bytes(kind).values())


def _part_bytes(kind: str) -> dict[str, int]:
    """Bytes of each plain part in a block."""
    return {name: sum(map(len, f.numbers)) // 8 for name, f in _fields()[kind].items()}


def from_blocks(data: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> QTensor:
    """The tensor whose rows consist of such blocks.

    Args:
        data: uint8 (..., blocks of a row * bytes of a block), on the CPU.
        kind: GGUF type, e.g. "q4_k".
        dtype: logical dtype of the tensor.

    Raises:
        CheckpointError: an exponent of MXFP4 is 255: 2**128 for ggml, and no number for others.
    """
    elements, size = block_size(kind)
    *lead, width = data.shape
    blocks = width // size
    if kind == "mxfp4" and bool((data[..., ::size] == 255).any()):
        raise CheckpointError(
            "a scale of MXFP4 has the exponent 255, which is 2**128 for ggml and NaN in the standard"
        )
    shape = (*lead, blocks * elements)
    moved = _move(data.reshape(prod(lead) * blocks, size), _both_ways(kind)[0])
    sizes = _part_bytes(kind)
    pieces = zip(sizes, moved.split(list(sizes.values()), 1), strict=True)
    leaves = {n: p.reshape(*lead, blocks * p.shape[1]) for n, p in pieces}
    return _assemble(leaves, gguf_spec(kind), shape, dtype)


def _assemble(
    leaves: dict[str, Tensor], spec: Spec, shape: tuple[int, ...], dtype: torch.dtype, at: str = ""
) -> QTensor:
    """A tensor around the bytes of its plain parts, those whose names begin with `at`."""
    grid = (*shape[:-1], shape[-1] // spec.block[-1])
    parts: Parts = {"qdata": leaves[f"{at}qdata"].view(registry.dtypes.get(spec.dtype).storage)}
    for name in ("scale", "zero_point"):
        if isinstance(spec.scale_dtype, Spec) and f"{at}{name}.qdata" in leaves:
            nested = spec.scale_dtype
            parts[name] = _assemble(leaves, nested, grid, torch.float32, f"{at}{name}.")
        elif f"{at}{name}" in leaves:
            parts[name] = leaves[f"{at}{name}"].view(_SCALES[str(spec.scale_dtype)])
    return QTensor(parts, spec, shape, dtype)


def kind_of(tensor: QTensor) -> str | None:
    """The GGUF type that has exactly the values of such a tensor, whatever its shape; None: there is none."""
    spec = tensor.canonical().spec
    # how the scales of MXFP4 were chosen makes no other values
    spec = replace(spec, options=tuple(each for each in spec.options if each[0] != "mx_mode"))
    for kind in FILE_TYPES:
        like = gguf_spec(kind)
        block = (1,) * (len(spec.block) - len(like.block)) + like.block[-len(spec.block) :]
        if Spec(like.dtype, block, like.scale_dtype, like.zero_point, like.layout) == spec:
            return kind
    return None


def to_blocks(tensor: QTensor, kind: str) -> Tensor:
    """Inverse of `from_blocks` for a tensor of that kind whose rows have whole blocks: bytes (..., n)."""
    elements, size = block_size(kind)
    *lead, k = tensor.shape
    leaves, blocks = dict(tensor.canonical().leaves()), k // elements
    pieces = [
        leaves[name].contiguous().view(torch.uint8).reshape(prod(lead) * blocks, count)
        for name, count in _part_bytes(kind).items()
    ]
    moved = _move(torch.cat(pieces, 1).cpu(), _both_ways(kind)[1])
    return moved.reshape(*lead, blocks * size)
