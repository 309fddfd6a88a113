"""Tensors kept between two blocks: in memory up to a number of bytes, the others in files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

__all__ = ["Kept", "Store", "storing"]


@dataclass(eq=False)
class Kept:
    """A tensor in a `Store`: in memory, or in a file."""

    nbytes: int
    tensor: Tensor | None
    path: Path | None = None


@dataclass
class Store:
    """Tensors that come back with the same bits, shape, strides and device."""

    #: bytes of memory that are held, at most
    budget: int
    folder: Path
    held: int = 0
    #: bytes that were written to files, in all
    spilled: int = 0
    _number: int = field(default=0, repr=False)

    def has_room(self, tensor: Tensor) -> bool:
        """Whether a tensor would be held in memory."""
        return self.held + tensor.nbytes <= self.budget

    def put(self, tensor: Tensor) -> Kept:
        """Keep a tensor, which nobody changes meanwhile."""
        if self.has_room(tensor):
            self.held += tensor.nbytes
            return Kept(tensor.nbytes, tensor)
        self._number += 1
        path = self.folder / f"{self._number}.pt"
        torch.save(tensor, path)
        self.spilled += tensor.nbytes
        return Kept(tensor.nbytes, None, path)

    def get(self, kept: Kept) -> Tensor:
        """The tensor."""
        if kept.tensor is not None:
            return kept.tensor
        assert kept.path is not None
        tensor: Tensor = torch.load(kept.path, weights_only=True)
        return tensor

    def drop(self, kept: Kept) -> None:
        """Forget a tensor."""
        if kept.tensor is not None:
            self.held -= kept.nbytes
            kept.tensor = None
        elif kept.path is not None:
            kept.path.unlink(missing_ok=True)


@contextmanager
def storing(budget: int) -> Iterator[Store]:
    """A store whose files are in a temporary folder, which is removed at the end in any case."""
    with TemporaryDirectory(prefix="ao-calibration-") as folder:
        yield Store(budget, Path(folder))
