"""Scales of blocks that are not as a format's own files have them, found out by the numbers.

Two things go wrong in files that a runtime wrote. Scales may lie in the order of the tensor cores
("swizzled"): tiles of 128 rows × 4 columns, and within a tile row r and column c at 16·(r mod 32) +
4·(r div 32) + c, padded with zeros to whole tiles; so cuBLAS ("1D block scaling factors layout") and
TensorRT-LLM take them. And the one number for all scales may be its reciprocal: compressed-tensors divides by
it, Model Optimizer multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.ext import CheckpointError
from ao_core.ext.interchange import Source

__all__ = [
    "Scales",
    "in_order",
    "is_reciprocal",
    "mended",
    "padded_size",
    "swizzle",
    "swizzled",
    "unswizzle",
]

_ROWS, _COLUMNS = 128, 4
#: how many of the largest tensors are looked at
_SAMPLE = 4
#: deviations from chance by which an order must explain the scales, and how many times those of the other
_SURE, _TIMES = 8.0, 1.5
#: what the greatest weight of a matrix is not, and what it may be
_NEVER, _LIKELY = (1e-6, 1e4), (1e-5, 1e3)
#: the greatest number of f4e2m1
_CODE = 6.0


class Scales(NamedTuple):
    """The scales (rows, blocks of a row) of one weight in a source."""

    name: str
    rows: int
    blocks: int
    #: the number for all of them; empty: there is none
    shared: str = ""


def _tiles(rows: int, blocks: int) -> tuple[int, int]:
    return -(-rows // _ROWS), -(-blocks // _COLUMNS)


def padded_size(rows: int, blocks: int) -> int:
    """How many numbers the whole tiles of scales (rows, blocks) have."""
    down, across = _tiles(rows, blocks)
    return down * _ROWS * across * _COLUMNS


def swizzle(scale: Tensor) -> Tensor:
    """Scales (N, G) in the order of the tensor cores, (⌈N/128⌉·128, ⌈G/4⌉·4)."""
    down, across = _tiles(*scale.shape)
    data = scale.view(torch.uint8)
    padded = F.pad(data, (0, across * _COLUMNS - data.shape[1], 0, down * _ROWS - data.shape[0]))
    tiles = padded.view(down, 4, 32, across, _COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * _ROWS, across * _COLUMNS).view(scale.dtype)


def unswizzle(stored: Tensor, rows: int, blocks: int) -> Tensor:
    """Inverse of `swizzle`, with the padding: (⌈rows/128⌉·128, ⌈blocks/4⌉·4)."""
    down, across = _tiles(rows, blocks)
    tiles = stored.reshape(-1).view(torch.uint8).view(down, across, 32, 4, _COLUMNS)
    found = tiles.permute(0, 3, 2, 1, 4).reshape(down * _ROWS, across * _COLUMNS)
    return found.contiguous().view(stored.dtype)


def _is_padded(form: tuple[int, ...], of: Scales) -> bool:
    """Whether a tensor has as many numbers as whole tiles have, and not the shape of the scales."""
    whole = padded_size(of.rows, of.blocks)
    return form != (of.rows, of.blocks) and torch.Size(form).numel() == whole


def _has_padding(found: Tensor, of: Scales) -> bool:
    """Whether there are zeros where a weight has no blocks."""
    data = found.view(torch.uint8)
    return not bool(data[of.rows :].any()) and not bool(data[:, of.blocks :].any())


def in_order(stored: Tensor, of: Scales, swizzled: bool) -> Tensor:
    """The scales (rows, blocks) of a weight; as they are stored where they are of another number.

    Args:
        stored: as the source has them.
        of: whose they are.
        swizzled: what `swizzled` says of those without padding.

    Raises:
        CheckpointError: they are padded, and what should be padding is not 0 in either order.
    """
    shape = (of.rows, of.blocks)
    if not _is_padded(tuple(stored.shape), of):
        fits = of.rows % _ROWS == 0 and of.blocks % _COLUMNS == 0
        whole = swizzled and fits and tuple(stored.shape) == shape
        return unswizzle(stored, *shape) if whole else stored
    down, across = _tiles(*shape)
    plain = stored.reshape(down * _ROWS, across * _COLUMNS)
    for found in (unswizzle(stored, *shape), plain):
        if _has_padding(found, of):
            return found[: of.rows, : of.blocks].contiguous()
    raise CheckpointError(
        f"{of.name} has {list(stored.shape)} scales for {list(shape)} blocks, and no padding of zeros"
    )


def _numbers(scale: Tensor) -> Tensor:
    """Logarithms of scales in float64; exponents as they are."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scale.view(torch.uint8).double()
    values = scale.float().abs().double().nan_to_num()
    return values.clamp(min=2.0**-10).log2()


def _explained(values: Tensor) -> float:
    """How far means of rows and columns explain a matrix (N, G), in deviations from that by chance."""
    n, g = values.shape
    centred = values - values.mean()
    total = float(centred.square().sum())
    if not total:
        return 0.0
    rows = g * float(centred.mean(1).square().sum())
    columns = n * float(centred.mean(0).square().sum())
    free = n + g - 2
    return float(((rows + columns) / total * (n * g - 1) - free) / (2 * free) ** 0.5)


def swizzled(source: Source, each: Sequence[Scales]) -> tuple[bool, str]:
    """Whether the scales of a source are in the order of tensor cores, and a sentence on what was found.

    Rows and columns of a weight differ in size, which scales show in their right order and not in another.
    Where they show nothing, they are taken to be in the order of the format.
    """
    padded = [of for of in each if _is_padded(source.forms[of.name][1], of)]
    if padded:
        of = padded[0]
        stored = source.take(of.name)
        tiles = _has_padding(unswizzle(stored, of.rows, of.blocks), of)
        order = "the order of tensor cores" if tiles else "their usual order"
        return tiles, (
            f"{of.name} has {list(stored.shape)} scales for {[of.rows, of.blocks]} blocks: padded to tiles "
            f"of 128 × 4, in {order}"
        )
    whole = [of for of in each if of.rows % _ROWS == 0 and of.blocks % _COLUMNS == 0]
    whole = [of for of in whole if source.forms[of.name][1] == (of.rows, of.blocks)]
    plain = other = 0.0
    for of in sorted(whole, key=lambda of: -of.rows * of.blocks)[:_SAMPLE]:
        stored = source.take(of.name)
        plain += _explained(_numbers(stored))
        other += _explained(_numbers(unswizzle(stored, of.rows, of.blocks)))
    if other < _SURE or other < _TIMES * plain:
        return False, ""
    return (
        True,
        "scales are in tiles of 128 × 4, the order of tensor cores, as rows and columns show",
    )


def _greatest(scale: Tensor, shared: float) -> tuple[float, float]:
    """The greatest weight that there can be if the shared number multiplies, and if it divides."""
    most = _CODE * float(scale.float().abs().nan_to_num().max()) if scale.numel() else 0.0
    return most * shared, most / shared if shared else 0.0


def is_reciprocal(scale: Tensor, shared: Tensor, *, divides: bool) -> bool:
    """Whether a number for all scales (N, G) is the reciprocal of what the format has there.

    The weights would be of a size that no weights have, and the other way they are of a usual one.

    Args:
        scale: of float8_e4m3fn, in any order.
        shared: one number.
        divides: whether scales are divided by it in the format; else they are multiplied.
    """
    if shared.numel() != 1:
        return False
    multiplied, divided = _greatest(scale, float(shared))
    found, other = (divided, multiplied) if divides else (multiplied, divided)
    return not _NEVER[0] < found < _NEVER[1] and _LIKELY[0] < other < _LIKELY[1] and found > 0


def mended(
    source: Source, each: Sequence[Scales], *, divides: bool = False
) -> tuple[Source, tuple[str, ...]]:
    """A source whose scales are as its format has them, and a sentence on what was not.

    Args:
        source: that is read.
        each: the scales of its weights in blocks.
        divides: whether the format divides scales by the shared number.
    """
    tiles, note = swizzled(source, each)
    notes = (note,) if note else ()
    wrong = []
    for of in [of for of in each if of.shared][:_SAMPLE]:
        scale, number = source.take(of.name), source.take(of.shared)
        wrong += [of.shared] if is_reciprocal(scale, number, divides=divides) else []
    if wrong:
        verb = "divide" if divides else "multiply"
        notes = (
            *notes,
            f"{wrong[0]} is the reciprocal of the number to {verb} by, as the size of the weights shows",
        )
    if not notes:
        return source, ()
    by_name = {of.name: of for of in each}
    shared = {of.shared for of in each if wrong}

    def take(name: str) -> Tensor:
        found = source.take(name)
        if name in by_name:
            return in_order(found, by_name[name], tiles)
        return found.float().reciprocal() if name in shared else found

    forms = dict(source.forms)
    for of in each:
        if _is_padded(forms[of.name][1], of):
            forms[of.name] = (forms[of.name][0], (of.rows, of.blocks))
    return replace(source, forms=forms, take=take), notes
