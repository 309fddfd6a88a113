"""The text: every Python file of the standard library, some of them held out by their names."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: byte between two files; no source file contains it
SEPARATOR = b"\0"
#: one file of so many is held out
HELD_OUT_ONE_IN = 20
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Bytes of the files for training and of those held out, each behind a separator, (N,) uint8."""

    train: Tensor
    held_out: Tensor
    #: which Python, how many files and bytes, and a hash over all of them
    about: dict[str, Any]


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training: by a hash of its name, the same in every version.

    Args:
        name: path below the library's folder, with forward slashes.
    """
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def read_corpus(root: Path | None = None) -> Corpus:
    """All files that are UTF-8, in order of the hash of their names.

    Args:
        root: folder of Python sources; by default the standard library.

    Raises:
        ValueError: one of the two parts is empty.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    digest = hashlib.sha256()
    for name, text in sorted(_sources(root), key=lambda file: _order(file[0])):
        digest.update(name.encode() + SEPARATOR + text + SEPARATOR)
        parts[is_held_out(name)] += [SEPARATOR, text]
    if not all(parts.values()):
        raise ValueError(f"root={root} has too few Python files to hold some out")
    train, held_out = (tokens(b"".join(parts[key])) for key in (False, True))
    about = {
        "python": platform.python_version() if root_is_own(root) else None,
        "files": len(parts[False]) // 2,
        "bytes": len(train),
        "held_out_files": len(parts[True]) // 2,
        "held_out_bytes": len(held_out),
        "sha256": digest.hexdigest(),
    }
    return Corpus(train, held_out, about)


def root_is_own(root: Path) -> bool:
    """Whether a folder is the standard library of the running Python."""
    return root == Path(sysconfig.get_paths()["stdlib"])


def tokens(text: bytes) -> Tensor:
    """The bytes of a text, (N,) uint8."""
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def sample(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows that begin anywhere, (batch, length) int64."""
    starts = torch.randint(len(stream) - length + 1, (batch, 1), generator=generator)
    return stream[starts + torch.arange(length)].long()


def spread(stream: Tensor, length: int, count: int | None = None) -> Tensor:
    """Windows of a stream for measuring, (count, length) int64: the same ones at every call.

    Each is `length` bytes; the second halves of all windows that there are lie side by side, so that
    scoring those alone scores each byte once, behind at least half a window.

    Args:
        stream: (N,) uint8.
        length: even.
        count: so many of them, evenly spread; by default all.

    Raises:
        ValueError: the stream has fewer.
    """
    starts = range(0, len(stream) - length + 1, length // 2)
    count = len(starts) if count is None else count
    if not 0 < count <= len(starts):
        raise ValueError(f"count={count}, but {len(stream)} bytes have {len(starts)} windows")
    chosen = torch.tensor([starts[index * len(starts) // count] for index in range(count)])
    return stream[chosen[:, None] + torch.arange(length)].long()


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if _LEFT_OUT & set(path.relative_to(root).parts):
            continue
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue  # a test of another encoding
        if text and SEPARATOR not in text:
            yield name, text


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
