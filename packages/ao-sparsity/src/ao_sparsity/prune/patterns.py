"""Which weights go together: single ones, N of M, blocks, rows, columns or heads.

All but N of M take the scores of a matrix apart into *units*, which stay or go as one, choose among those,
and spread the choice over the matrix again. Matrices are (..., out, in); scores are not negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ao_core import Config
from ao_core.ext import ConfigError
from ao_sparsity.masks import block_scores, greatest_mask, n_of_m_mask, spread_blocks, vector_norm

__all__ = [
    "SCOPES",
    "Blocks",
    "Columns",
    "Heads",
    "NofM",
    "Pattern",
    "Rows",
    "Share",
    "Unstructured",
    "checked_share",
]

#: what a share is taken of: each row of units, each matrix, or all matrices together
SCOPES = ("row", "layer", "model")

S = TypeVar("S", bound="Share")
Shape = tuple[int, ...]


class Pattern(Config):
    """Base of all patterns; `FqnToConfig` gives one to each name of a parameter."""

    #: the share that goes, 0 to 1
    sparsity: float

    def at(self, sparsity: float) -> Pattern:
        """The same pattern with another sparsity."""
        raise NotImplementedError

    def refuses(self, shape: Shape) -> str | None:
        """Why a matrix of this shape cannot have the pattern; None where it can."""
        return None

    def masks(self, scores: Sequence[Tensor], scope: str) -> list[Tensor]:
        """Masks of all matrices, True for kept elements, by the scores of the elements.

        Args:
            scores: of each matrix.
            scope: one of `SCOPES`.

        Raises:
            ConfigError: the pattern has no such scope.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NofM(Pattern):
    """`n` of every `m` weights along a row stay: so many in each group, wherever in the model it is."""

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.m <= 255 or not 0 <= self.n <= self.m:
            raise ConfigError(f"n={self.n}, m={self.m}: need 0 <= n <= m and 1 <= m <= 255")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def sparsity(self) -> float:  # type: ignore[override]
        """1 - n/m."""
        return 1 - self.n / self.m

    def at(self, sparsity: float) -> NofM:
        """With as many kept of `m` as is nearest to a sparsity."""
        return replace(self, n=self.m - round(checked_share(sparsity) * self.m))

    def refuses(self, shape: Shape) -> str | None:
        """A row must have a whole group."""
        short = shape[-1] < self.m
        return f"its rows of {shape[-1]} are shorter than a group of {self.m}" if short else None

    def masks(self, scores: Sequence[Tensor], scope: str) -> list[Tensor]:
        """The greatest of each group.

        Raises:
            ConfigError: `scope` is "model", across which nothing is compared.
        """
        if scope == "model":
            raise ConfigError(
                f"scope='model': {self} leaves every group the same number, so layers have no budget to "
                "share; use scope='layer'"
            )
        return [n_of_m_mask(each, self.n, self.m) for each in scores]


@dataclass(frozen=True)
class Share(Pattern):
    """Base of the patterns that remove a share of the units, rounded to a whole number of units."""

    sparsity: float
    #: whether units lie in rows, so that each row can have the same share
    in_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checked_share(self.sparsity)

    def __str__(self) -> str:
        return f"{self._name()} {self.sparsity:.4g}"

    def _name(self) -> str:
        return type(self).__name__.lower()

    def at(self: S, sparsity: float) -> S:
        """The same units, with another share."""
        return replace(self, sparsity=sparsity)

    def units(self, scores: Tensor) -> Tensor:
        """One score per unit."""
        raise NotImplementedError

    def spread(self, kept: Tensor, shape: Shape) -> Tensor:
        """Expand a mask over `units` to the elements of the matrix."""
        raise NotImplementedError

    def masks(self, scores: Sequence[Tensor], scope: str) -> list[Tensor]:
        """The units of the greatest scores."""
        if scope == "row" and not self.in_rows:
            raise ConfigError(f"scope='row': the units of {self} do not lie in rows; use 'layer'")
        units = [self.units(each) for each in scores]
        if scope == "row":
            kept = [self._greatest(each) for each in units]
        elif scope == "layer":
            kept = [self._greatest(each.flatten()).view_as(each) for each in units]
        else:
            device = units[0].device
            flat = self._greatest(torch.cat([each.flatten().to(device) for each in units]))
            parts = flat.split([each.numel() for each in units])
            kept = [p.view(u.shape).to(u.device) for p, u in zip(parts, units, strict=True)]
        return [self.spread(k, tuple(s.shape)) for k, s in zip(kept, scores, strict=True)]

    def _greatest(self, units: Tensor) -> Tensor:
        count = units.shape[-1]
        return greatest_mask(units, count - round(self.sparsity * count))


@dataclass(frozen=True)
class Unstructured(Share):
    """Single weights."""

    in_rows: ClassVar[bool] = True

    def units(self, scores: Tensor) -> Tensor:
        """The scores themselves."""
        return scores

    def spread(self, kept: Tensor, shape: Shape) -> Tensor:
        """The mask itself."""
        return kept


@dataclass(frozen=True)
class _Normed(Share):
    """Units whose score is a norm of those of their elements."""

    #: of the norm: 1, 2, inf or any positive number
    order: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order > 0:
            raise ConfigError(f"order={self.order!r}: need a positive number, such as 1, 2 or inf")


@dataclass(frozen=True)
class Blocks(_Normed):
    """Blocks of (rows, columns); what is cut off at the edges counts as one too."""

    #: rows and columns of a block
    size: tuple[int, int] = (64, 64)
    in_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.size) < 1:
            raise ConfigError(f"size={self.size!r}: need two numbers of at least 1")

    def _name(self) -> str:
        return f"blocks {self.size[0]}×{self.size[1]}"

    def refuses(self, shape: Shape) -> str | None:
        """A block must fit."""
        rows, columns = self.size
        if shape[-2] < rows or shape[-1] < columns:
            return f"its {shape[-2]}×{shape[-1]} are smaller than a block of {rows}×{columns}"
        return None

    def units(self, scores: Tensor) -> Tensor:
        """Norms of (..., rows of blocks, blocks)."""
        return block_scores(scores, self.size, self.order)

    def spread(self, kept: Tensor, shape: Shape) -> Tensor:
        """All elements of the blocks."""
        return spread_blocks(kept, self.size, shape)


@dataclass(frozen=True)
class Rows(_Normed):
    """Rows of the matrix: outputs of a layer."""

    def units(self, scores: Tensor) -> Tensor:
        """Norms of (..., out)."""
        return vector_norm(scores, self.order, -1)

    def spread(self, kept: Tensor, shape: Shape) -> Tensor:
        """All elements of the rows."""
        return kept.unsqueeze(-1).expand(shape)


@dataclass(frozen=True)
class Columns(_Normed):
    """Columns of the matrix: inputs of a layer."""

    def units(self, scores: Tensor) -> Tensor:
        """Norms of (..., in)."""
        return vector_norm(scores, self.order, -2)

    def spread(self, kept: Tensor, shape: Shape) -> Tensor:
        """All elements of the columns."""
        return kept.unsqueeze(-2).expand(shape)


@dataclass(frozen=True)
class Heads(_Normed):
    """Attention heads: equal parts of the columns, or of the rows of what makes queries, keys or values."""

    heads: int = 1
    #: the dimension that heads are parts of: -1 columns, -2 rows
    dim: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1 or self.dim not in (-1, -2):
            raise ConfigError(f"heads={self.heads}, dim={self.dim}: need heads >= 1, dim -1 or -2")

    def refuses(self, shape: Shape) -> str | None:
        """Heads must have the same size."""
        size, what = shape[self.dim], "columns" if self.dim == -1 else "rows"
        odd = size % self.heads
        return f"its {size} {what} do not divide by {self.heads} heads" if odd else None

    def units(self, scores: Tensor) -> Tensor:
        """Norms of (..., heads)."""
        parts = scores.movedim(self.dim, -2).unflatten(-2, (self.heads, -1))
        return vector_norm(parts, self.order, (-2, -1))

    def spread(self, kept: Tensor, shape: Shape) -> Tensor:
        """All elements of the heads."""
        along = kept.repeat_interleave(shape[self.dim] // self.heads, -1)
        return along.unsqueeze(-2 if self.dim == -1 else -1).expand(shape)


def checked_share(sparsity: float) -> float:
    """A sparsity that is one; raises `ConfigError`."""
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"sparsity={sparsity!r}: need a share from 0 to 1")
    return sparsity
