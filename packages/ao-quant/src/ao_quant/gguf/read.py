"""Reading GGUF files."""

from __future__ import annotations

import sys
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext import CheckpointError, checked
from ao_core.ext.quantizing import Progress, watched
from ao_quant.configs.gguf import FILE_TYPES
from ao_quant.gguf.blocks import block_size, from_blocks
from ao_quant.gguf.header import Entry, Header, read_header
from ao_quant.gguf.metadata import gguf_package
from ao_quant.gguf.names import Place, places

__all__ = [
    "DENSE",
    "GGUFFile",
    "GGUFHeader",
    "GGUFInfo",
    "mapped_tensors",
    "read_gguf",
    "read_gguf_header",
]

#: GGUF type -> dtype of a dense tensor
DENSE = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


class GGUFInfo(NamedTuple):
    """What the header of a GGUF file says of a tensor."""

    #: of ggml, in lower case: "q4_k", "f16"
    type: str
    #: in torch's order
    shape: tuple[int, ...]


class GGUFHeader(NamedTuple):
    """What a GGUF file holds, without the tensors themselves."""

    #: by the name in the file, in its order
    tensors: dict[str, GGUFInfo]
    #: as that of `GGUFFile`
    metadata: dict[str, Any]

    @property
    def quantized(self) -> bool:
        """Whether a tensor is in blocks."""
        return any(info.type in FILE_TYPES for info in self.tensors.values())


class GGUFFile(NamedTuple):
    """What a GGUF file holds."""

    #: by name, in the order of the file
    tensors: dict[str, Tensor]
    #: str, bool, numpy scalar, list of str or numpy array, by key and in order
    metadata: dict[str, Any]


@checked
def read_gguf(
    path: str | PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    names: str = "file",
    progress: Progress = None,
) -> GGUFFile:
    """The tensors and the metadata of a GGUF file.

    Dense tensors are mapped from the file: they are read when they are used, and changing one changes
    memory alone. Those in blocks become `QTensor`s with exactly the values of the file, one copy each.

    Args:
        path: the file.
        dtype: logical dtype of the quantized tensors; GGUF has none.
        names: "file": tensors as they are in the file; "transformers": by the names of the parameters of a
            model of transformers, and the rows of queries and keys, which llama.cpp reorders in files of
            Llama, in the order of that model. Gains of norms, to which it adds 1 in files of Gemma, are those
            of the model. For Llama, Qwen 2, Qwen 3 and Gemma 3.
        progress: True shows a bar, a function is called as (done, total, name of the next tensor).

    Raises:
        CheckpointError: it is not a GGUF file, is damaged, or has a tensor of an unsupported type; or
            its names in transformers are not known.
        ConfigError: no such `names`.
        MissingExtraError: the package `gguf` is not installed.
    """
    header = _header(path)
    by_name = {entry.name: entry for entry in header.entries}
    to = places(names, by_name, header.metadata)
    memory = _mapped(path, header.entries)
    tensors = {
        to[entry.name].model: _tensor(memory, entry, dtype, to[entry.name])
        for entry in watched(header.entries, list(by_name), progress, "read")
    }
    return GGUFFile(tensors, header.metadata)


@checked
def read_gguf_header(path: str | PathLike[str]) -> GGUFHeader:
    """The metadata of a GGUF file, and the types and shapes of its tensors, of which none is read.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is not a GGUF file, is damaged, or has a tensor of an unsupported type.
        MissingExtraError: the package `gguf` is not installed.
    """
    header = _header(path)
    tensors = {e.name: GGUFInfo(_type(e).lower(), e.shape) for e in header.entries}
    return GGUFHeader(tensors, header.metadata)


def mapped_tensors(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a file as it is stored: numbers, or bytes (..., n) of blocks; mapped, not read.

    Raises:
        CheckpointError: as `read_gguf`.
    """
    header = _header(path)
    memory = _mapped(path, header.entries)
    found = {}
    for entry in header.entries:
        data = memory[entry.start : entry.start + _size(entry)]
        name = _type(entry)
        if name in DENSE:
            found[entry.name] = _numbers(data, DENSE[name]).view(entry.shape)
        else:
            elements, size = _block(entry)
            found[entry.name] = data.view(*entry.shape[:-1], entry.shape[-1] // elements * size)
    return found


def _header(path: str | PathLike[str]) -> Header:
    """The header of a file whose tensors can be read.

    Raises:
        CheckpointError: see `read_gguf`.
    """
    gguf_package()
    header = read_header(Path(path))
    if sys.byteorder != "little":
        raise CheckpointError(f"{path}: GGUF files are read on little-endian machines only")
    for entry in header.entries:
        name = _type(entry)
        if name not in DENSE and name.lower() not in FILE_TYPES:
            known = ", ".join([*DENSE, *(kind.upper() for kind in FILE_TYPES)])
            raise CheckpointError(
                f"{path}: the tensor {entry.name!r} has the type {name}, which is not supported; "
                f"supported are {known}"
            )
        if (block := _block(entry)[0]) > 1 and entry.shape[-1] % block:
            raise CheckpointError(
                f"{path} is not a GGUF file, or it is damaged: rows of {entry.name!r} have {entry.shape[-1]} "
                f"elements, and {name} has blocks of {block}"
            )
    return header


def _type(entry: Entry) -> str:
    """What ggml calls its type."""
    try:
        return str(gguf_package().GGMLQuantizationType(entry.kind).name)
    except ValueError:
        return f"{entry.kind}"


def _block(entry: Entry) -> tuple[int, int]:
    """(elements, bytes) of a block; of a number where it is dense."""
    name = _type(entry)
    return (1, DENSE[name].itemsize) if name in DENSE else block_size(name.lower())


def _size(entry: Entry) -> int:
    elements, size = _block(entry)
    return prod(entry.shape) // elements * size


def _mapped(path: str | PathLike[str], entries: list[Entry]) -> Tensor:
    """The bytes of a file, which must have those of all its tensors; changing them changes memory alone.

    Raises:
        CheckpointError: it ends before.
    """
    import numpy

    memory = torch.from_numpy(numpy.memmap(path, mode="c"))  # torch has none that cannot be written
    for entry in entries:
        if entry.start + _size(entry) > len(memory):
            raise CheckpointError(
                f"{path} is not a GGUF file, or it is damaged: {entry.name!r} ends behind the end of the file"
            )
    return memory


def _tensor(memory: Tensor, entry: Entry, dtype: torch.dtype, place: Place) -> Tensor:
    name, lead = _type(entry), entry.shape[:-1]
    data = memory[entry.start : entry.start + _size(entry)]
    if name not in DENSE:
        elements, size = _block(entry)
        rows = place.read(data.view(*lead, entry.shape[-1] // elements * size))
        return from_blocks(rows, name.lower(), dtype)
    dense = place.read(_numbers(data, DENSE[name]).view(entry.shape))
    return dense.float() - place.added if place.added else dense


def _numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of a type; alignments below that of the type are those of few files."""
    aligned = data.storage_offset() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype)
