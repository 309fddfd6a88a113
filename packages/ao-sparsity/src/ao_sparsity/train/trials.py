"""How kernels of the ops of 2:4 training are tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Kernel, OpCall, Spec
from ao_core.testing import KernelCase, OpTrial
from ao_core.testing.base import gaussian
from ao_sparsity.train.kernels import MaskedCall
from ao_sparsity.train.tiles import TILE, patterns, tile_mask

__all__ = ["SEMI_SPARSE_MM", "TILE_MASK"]

#: how far apart sums may be that a kernel takes for equal, of magnitudes of about 1
_TIE = 1e-5


class _Masked(OpTrial):
    """Weights (N, K), all dense."""

    specs = ()
    shapes: Sequence[tuple[int, ...]] = ((16, 64), (48, 80), (33, 70), (3, 5))

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        return [()]

    def odd_calls(self, call: Any) -> Iterator[OpCall]:
        yield replace(call, x_dtype=torch.float64)

    def weight(self, case: KernelCase, seed: int) -> Tensor:
        """Normal values."""
        return gaussian(case.shape, seed=seed, device=case.device).to(case.dtype)


class _TileMask(_Masked):
    """Against a search in float64 among all patterns of each tile. A batch is what the weight has."""

    shapes = (*_Masked.shapes, (0, 8))
    batches = ("gaussian", "ties")

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        return MaskedCall(op, case.shape, case.shape, case.dtype, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        weight = self.weight(case, seed)
        if batch == "ties":
            weight = weight.sign()
        yield (weight,), (weight, _greatest_sums(weight))

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        weight, best = expected
        assert (actual.dtype, actual.shape) == (torch.bool, weight.shape)
        assert actual.is_contiguous()
        for direction in (actual, actual.t()):
            kept = F.pad(direction, (0, -direction.shape[1] % TILE)).unflatten(1, (-1, TILE))
            assert not kept.numel() or int(kept.sum(-1).max()) <= 2, "more than two of four stay"
        sums = _tiled(weight.double().abs() * actual).sum((0, 1))
        assert bool((sums >= best - _TIE * best.clamp_min(1)).all()), "another pattern keeps more"


class _SemiSparse(_Masked):
    """Against float64. A batch is the number of rows, and whether the weight is transposed."""

    batches = tuple((rows, way) for rows in (0, 1, 5, 32) for way in (False, True))

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        rows, transposed = batch
        x_shape = (rows, case.shape[0 if transposed else 1])
        return MaskedCall(op, case.shape, x_shape, case.dtype, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        rows, transposed = batch
        weight = self.weight(case, seed)
        mask = tile_mask(weight)
        a = gaussian((rows, case.shape[0 if transposed else 1]), seed=seed + 1, device=case.device)
        a, kept = a.to(case.dtype), (weight * mask).double()
        yield (a, weight, mask, transposed), a.double() @ (kept if transposed else kept.t())


def _tiled(x: Tensor) -> Tensor:
    """(4, 4, tiles) of a matrix filled up with zeros."""
    x = F.pad(x, (0, -x.shape[1] % TILE, 0, -x.shape[0] % TILE))
    height, width = x.shape[0] // TILE, x.shape[1] // TILE
    return x.view(height, TILE, width, TILE).permute(1, 3, 0, 2).reshape(TILE, TILE, height * width)


def _greatest_sums(weight: Tensor) -> Tensor:
    """Of each tile the greatest sum of magnitudes, float64 (tiles,), that one of the 90 patterns keeps."""
    tiles = _tiled(weight.double().abs())
    pairs = [(i, j) for i in range(TILE) for j in range(i + 1, TILE)]
    sums = [
        torch.stack([tiles[row, list(pairs[pair])].sum(0) for row, pair in enumerate(rows)]).sum(0)
        for rows in patterns()
    ]
    return torch.stack(sums).amax(0)


TILE_MASK = _TileMask()
SEMI_SPARSE_MM = _SemiSparse()
