"""Contenders of a linear layer with sparse weights: random blocks, or two of every four values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from ours import stored
from rotation import Contender, copies, matmul
from torch import Tensor

from ao_core import WHOLE, Call, QTensor, Spec
from ao_core.ext import NO_SCALE, Parts, registry
from ao_core.ext.kernels import select

ROW = (1, WHOLE)
INT8 = Spec("int8", ROW)
#: name -> number format and activations
FORMATS = {
    "bf16": Spec("bf16", ROW, NO_SCALE),
    "int8": Spec("int8", ROW, "bfloat16"),
    "int8 dynamic": Spec("int8", ROW, "bfloat16", act=INT8),
    "int4 g128": Spec("int4", (1, 128), "bfloat16"),
}
#: two places of four, as the layout `two_four` writes them
PLACES = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)


@dataclass(frozen=True)
class Sparse:
    """A kind of sparse weight: `block` rows and columns of blocks, or 0 for two of every four."""

    fmt: str
    block: int
    sparsity: float

    @property
    def name(self) -> str:
        """As the table has it."""
        kind = f"bsr {self.block}×{self.block} {self.sparsity:.0%}" if self.block else "2:4"
        return f"{kind} {self.fmt}"


def sparse_linear(shape: tuple[int, int], kind: Sparse, m: int, most: int) -> Contender:
    """`F.linear` with random weights (N, K) of that kind, in the layout that serves best here.

    Args:
        shape: of the weight.
        kind: of the weight.
        m: rows of activations.
        most: copies of the weight at most.
    """
    make = _blocks if kind.block else _two_four
    first = make(shape, kind, 0)
    nbytes = stored(first)
    call = Call("linear", first.spec, shape, (m, shape[1]), torch.bfloat16, "cpu")
    rotated = [make(shape, kind, number) for number in copies(nbytes)[:most]]
    return matmul(kind.name, rotated, nbytes, F.linear, shape[1], kernel=select(call).name)


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = (0, 256) if dtype == torch.uint8 else (-127, 128)
    return torch.randint(low, high, shape, dtype=dtype, generator=generator)


def _scaled(parts: Parts, spec: Spec, shape: tuple[int, int], generator: torch.Generator) -> Parts:
    if spec.scale_dtype == NO_SCALE:
        return parts
    groups = 1 if spec.block[1] == WHOLE else -(-shape[1] // spec.block[1])
    scale = torch.rand(shape[0], groups, generator=generator).add(0.5).div(128)
    return {**parts, "scale": scale.to(torch.bfloat16)}


def _blocks(shape: tuple[int, int], kind: Sparse, number: int) -> QTensor:
    """The same number of blocks in each copy, at random places."""
    generator = torch.Generator().manual_seed(number)
    (n, k), side, base = shape, kind.block, FORMATS[kind.fmt]
    layout, fmt = registry.layouts.get("bsr_cpu"), registry.dtypes.get(base.dtype)
    rows, columns = n // side, k // side
    order = torch.rand(rows * columns, generator=generator).argsort()
    kept = torch.zeros(rows * columns, dtype=torch.bool)
    kept[order[: round((1 - kind.sparsity) * rows * columns)]] = True
    kept = kept.view(rows, columns)
    parts = {
        "qdata": _random((int(kept.sum()), side, side), fmt.storage, generator),
        "col_indices": kept.nonzero()[:, 1].to(torch.int32),
        "crow_indices": F.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32),
    }
    spec = Spec(
        base.dtype, ROW, base.scale_dtype, "none", layout.name, base.act, (("blocksize", side),)
    )
    parts = layout.from_canonical(_scaled(parts, spec, shape, generator), spec, shape, fmt)
    return QTensor(parts, spec, shape, torch.bfloat16)


def _two_four(shape: tuple[int, int], kind: Sparse, number: int) -> QTensor:
    generator = torch.Generator().manual_seed(number)
    (n, k), base = shape, FORMATS[kind.fmt]
    fmt = registry.dtypes.get(base.dtype)
    size, storage = (k // 2, fmt.storage) if fmt.bits >= 8 else (k // 4, torch.uint8)
    places = torch.tensor(PLACES, dtype=torch.uint8)
    nibbles = places[torch.randint(0, 6, (2, n, k // 8), generator=generator)]
    parts = {
        "qdata": _random((n, size), storage, generator),
        "index": nibbles[0] | nibbles[1] << 4,
    }
    spec = Spec(base.dtype, base.block, base.scale_dtype, "none", "two_four", base.act)
    return QTensor(_scaled(parts, spec, shape, generator), spec, shape, torch.bfloat16)


def limit(kind: Sparse, m: int) -> float:
    """How many times as fast as the dense matmul a weight could be: by what it has to compute or read."""
    if m > 16:
        return 1 / (1 - kind.sparsity)
    bits = {"bf16": 16, "int8": 8, "int8 dynamic": 8, "int4 g128": 4}[kind.fmt]
    return 16 / ((1 - kind.sparsity) * bits + (0 if kind.block else 1))


def kinds(m: int) -> Iterator[Sparse]:
    """What is measured with so many rows of activations."""
    for sparsity in (0.3, 0.4, 0.5, 0.8, 0.9, 0.95) if m > 16 else (0.5, 0.8, 0.9):
        yield Sparse("bf16", 64, sparsity)
    for block in (32, 16):
        yield Sparse("bf16", block, 0.8)
    for fmt in ("int8", "int8 dynamic"):
        yield Sparse(fmt, 64, 0.8)
    yield from map(partial(Sparse, block=0, sparsity=0.5), ("bf16", "int8", "int4 g128"))
