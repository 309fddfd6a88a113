"""Reading safetensors files that hold pieces of tensors, alone or through torch's distributed checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ao_core import open_checkpoint

__all__ = ["FilesReader", "Piece", "pieces_of", "whole"]

#: where the writer of torch says which piece of a tensor a file holds
_PIECES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that a file holds."""

    #: the file; the name is that which torch's reader asks for
    relative_path: str
    offsets: torch.Size
    #: an `ao_core` slot: dtype, shape, `read()`
    slot: Any


def pieces_of(files: Iterable[Path]) -> dict[str, list[Piece]]:
    """The pieces of every tensor in some safetensors files, whether ao wrote them or torch's own writer.

    Raises:
        CheckpointError: a file is none, or is damaged.
    """
    found: dict[str, list[Piece]] = {}
    for path in sorted(files):
        slots = open_checkpoint(path).slots
        with safe_open(path, "pt") as file:
            offsets = json.loads((file.metadata() or {}).get(_PIECES, "{}"))
        for name, slot in slots.items():
            start = offsets.get(name, {}).get(_OFFSETS, [0] * len(slot.shape))
            found.setdefault(name, []).append(Piece(str(path), torch.Size(start), slot))
    return found


def whole(pieces: list[Piece]) -> Tensor:
    """The tensor that consists of some pieces."""
    out = torch.empty(_size(pieces), dtype=pieces[0].slot.dtype)
    for piece in pieces:
        part = piece.slot.read()
        ends = zip(piece.offsets, part.shape, strict=True)
        out[tuple(slice(start, start + size) for start, size in ends)] = part
    return out


def _size(pieces: list[Piece]) -> tuple[int, ...]:
    ends = (
        [start + size for start, size in zip(p.offsets, p.slot.shape, strict=True)] for p in pieces
    )
    return tuple(max(along) for along in zip(*ends, strict=True))


class FilesReader(HuggingFaceStorageReader):
    """Pieces for torch's distributed checkpoint, in every dtype that safetensors has.

    The base class reads every such file of a folder, and fails at a dtype that safetensors names and its
    torch module does not (`F8_E8M0`, the scales of MX formats).
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = sorted(files)
        super().__init__(path=str(self.files[0].parent))

    def read_metadata(self) -> Metadata:
        """Where every piece of every tensor is."""
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        for name, pieces in pieces_of(self.files).items():
            chunks = [ChunkStorageMetadata(p.offsets, torch.Size(p.slot.shape)) for p in pieces]
            kind = TensorProperties(pieces[0].slot.dtype)
            tensors[name] = TensorStorageMetadata(kind, torch.Size(_size(pieces)), chunks)
            stored |= {MetadataIndex(name, piece.offsets): piece for piece in pieces}
        return Metadata(
            tensors, storage_data=stored, storage_meta=StorageMeta(load_id=self.load_id)
        )
