"""Reading GGUF files."""

from __future__ import annotations

import sys
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext import CheckpointError, checked
from ao_core.ext.quantizing import Progress, watched
from ao_quant.configs.gguf import GGUF_TYPES
from ao_quant.gguf.blocks import from_blocks
from ao_quant.gguf.header import check_header
from ao_quant.gguf.metadata import gguf_package, read_metadata
from ao_quant.gguf.names import Place, places

__all__ = ["DENSE", "GGUFFile", "GGUFHeader", "GGUFInfo", "read_gguf", "read_gguf_header"]

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
        return any(info.type in GGUF_TYPES for info in self.tensors.values())


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
    reader = _reader(path)
    entries = {entry.name: entry for entry in reader.tensors}
    metadata = read_metadata(reader)
    to = places(names, entries, metadata)
    tensors = {
        to[entry.name].model: _tensor(entry, dtype, to[entry.name])
        for entry in watched(list(entries.values()), list(entries), progress, "read")
    }
    return GGUFFile(tensors, metadata)


@checked
def read_gguf_header(path: str | PathLike[str]) -> GGUFHeader:
    """The metadata of a GGUF file, and the types and shapes of its tensors, of which none is read.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is not a GGUF file, is damaged, or has a tensor of an unsupported type.
        MissingExtraError: the package `gguf` is not installed.
    """
    reader = _reader(path)
    tensors = {
        entry.name: GGUFInfo(
            entry.tensor_type.name.lower(), tuple(int(size) for size in entry.shape[::-1])
        )
        for entry in reader.tensors
    }
    return GGUFHeader(tensors, read_metadata(reader))


def _reader(path: str | PathLike[str]) -> Any:
    """The reader of the `gguf` package, of a file that ao can read."""
    gguf = gguf_package()
    check_header(Path(path))
    try:
        # mapped as copy-on-write: torch has no tensors that cannot be written
        reader = gguf.GGUFReader(Path(path), "c")
    except OSError:
        raise
    except Exception as error:  # whatever the bytes of a damaged file lead to
        raise CheckpointError(f"{path} is not a GGUF file, or it is damaged: {error}") from error
    if reader.byte_order != "I" or sys.byteorder != "little":
        raise CheckpointError(f"{path}: only little-endian files, on such machines, are supported")
    for entry in reader.tensors:
        _check(path, entry)
    return reader


def _check(path: str | PathLike[str], entry: Any) -> None:
    name = entry.tensor_type.name
    if name not in DENSE and name.lower() not in GGUF_TYPES:
        known = ", ".join([*DENSE, *(kind.upper() for kind in GGUF_TYPES)])
        raise CheckpointError(
            f"{path}: the tensor {entry.name!r} has the type {name}, which is not supported; "
            f"supported are {known}"
        )


def _tensor(entry: Any, dtype: torch.dtype, place: Place) -> Tensor:
    name, data = entry.tensor_type.name, place.read(torch.from_numpy(entry.data))
    if name not in DENSE:
        return from_blocks(data, name.lower(), dtype)
    dense = data.view(DENSE[name]) if name == "BF16" else data
    return dense.float() - place.added if place.added else dense
