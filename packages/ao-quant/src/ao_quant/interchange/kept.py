"""Tensors that are on disk already while a conversion goes on with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core.ext import CheckpointError
from ao_core.ext.interchange import memory_of

__all__ = ["Form", "Kept", "dtype_of", "forms_of"]

Form = tuple[torch.dtype, tuple[int, ...]]


def dtype_of(name: str) -> torch.dtype:
    """The dtype that `str` calls "torch." and this name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True)
class Kept(Mapping[str, Tensor]):
    """Tensors in a file, each of which is read, into memory of its own, whenever it is asked for."""

    path: Path
    #: number of the file
    shard: int
    #: name -> [dtype, shape, bytes from, bytes to, checksum], as they are stored
    leaves: dict[str, list[Any]]
    #: what those are whose form a file cannot hold
    raw: dict[str, Form]

    @property
    def forms(self) -> dict[str, Form]:
        """Dtypes and shapes, which nothing is read for."""
        stored = {n: (dtype_of(d), tuple(shape)) for n, (d, shape, *_) in self.leaves.items()}
        return stored | self.raw

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.forms[name]
        _, _, start, end, _ = self.leaves[name]
        found = torch.empty(shape, dtype=dtype)
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            data, done = memoryview(memory_of(found)).cast("B"), 0
            while done < end - start:
                got = file.readinto(data[done:])
                if not got:
                    raise CheckpointError(f"{self.path}: {name!r} is cut off")
                done += got
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """Dtypes and shapes of tensors, which are not read where they are kept."""
    if isinstance(tensors, Kept):
        return tensors.forms
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
