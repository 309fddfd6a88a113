"""Tensors whose memory is that of a file, of which the machine keeps no more than it has room for."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from math import prod
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import torch
from torch import Tensor

__all__ = ["give_back", "mapped_from", "spilled", "spilling"]

#: bytes of a tensor that is worth a file
_LEAST = 1 << 20
_FOLDER: ContextVar[Path | None] = ContextVar("spilling", default=None)


@contextmanager
def spilling(folder: Path) -> Iterator[None]:
    """Within this context, `spilled` puts tensors into files of a folder."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def spilled(tensor: Tensor) -> Tensor:
    """The same values in a file that is mapped into memory, within `spilling`; else the tensor itself.

    The file has no name, so that it is gone with the tensor, or with the process. Small tensors stay.
    """
    folder = _FOLDER.get()
    if folder is None or tensor.nbytes < _LEAST or tensor.device.type != "cpu":
        return tensor
    descriptor, name = mkstemp(dir=folder, prefix="spilled-")
    path = Path(name)
    try:
        with open(descriptor, "r+b") as file:
            file.truncate(tensor.nbytes)
        storage = torch.UntypedStorage.from_file(str(path), True, tensor.nbytes)
    finally:
        with suppress(OSError):  # of a system on which a mapped file keeps its name
            path.unlink()
    found = torch.empty(0, dtype=tensor.dtype)
    found.set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
    found.copy_(tensor.detach())
    give_back()  # what was freed of the tensors before
    return found


def mapped_from(
    path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor | None:
    """A tensor of the bytes of a file from `start` on; None where it is empty or not aligned to its elements.

    Nothing is read before it is used. What is written to it does not come into the file.
    """
    count = prod(shape)
    if not count or start % dtype.itemsize:
        return None
    # its own pages alone: a system may refuse to map more at once than it has memory
    page = start - start % mmap.ALLOCATIONGRANULARITY
    length = start - page + count * dtype.itemsize
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start - page).view(shape)


def give_back() -> None:
    """Return to the system what was freed, where the C library keeps it for later.

    glibc takes tensors below 32 MiB from its heap. What is needed for a moment lies between tensors that
    stay, so the heap grows by more than these. Other C libraries have no such call, and need none.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
