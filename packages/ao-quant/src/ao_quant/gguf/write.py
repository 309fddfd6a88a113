"""Writing GGUF files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext import CheckpointError, checked
from ao_core.ext.quantizing import Progress, watched
from ao_quant.configs.gguf import GGUF_TYPES
from ao_quant.gguf.blocks import block_size, kind_of, to_blocks
from ao_quant.gguf.metadata import add_metadata, gguf_package
from ao_quant.gguf.names import Place, places
from ao_quant.gguf.read import DENSE

__all__ = ["Info", "write_gguf", "write_whole"]

#: what ggml can read
_DIMS, _NAME_BYTES = 4, 63


class Entry(NamedTuple):
    """A tensor that is to be written."""

    place: Place
    tensor: Tensor
    #: GGUF type
    kind: str
    nbytes: int


@checked
def write_gguf(
    path: str | PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    *,
    names: str = "file",
    progress: Progress = None,
) -> None:
    """Write a GGUF file, which replaces one of that name when it is complete.

    Quantized tensors are written as the GGUF type whose values they have, bit for bit, however they
    came to be. Memory beside them is that of the largest.

    Args:
        path: the file.
        tensors: dense ones and `QTensor`s by name, written in this order.
        metadata: by key, as `read_gguf` gives it. Integers of Python become UINT32 where they fit (INT32 in
            lists), floats FLOAT32; numpy scalars and arrays keep their type.
        names: what `tensors` is named by, as for `read_gguf`: "file" or "transformers".
        progress: True shows a bar, a function is called as (done, total, name of the next tensor).

    Raises:
        CheckpointError: a tensor that GGUF cannot hold, or whose name in the file is not known; nothing is
            written.
        ConfigError: a value of the metadata that GGUF cannot hold, or no such `names`; nothing is written.
        MissingExtraError: the package `gguf` is not installed.
    """
    to = places(names, tensors, metadata or {})
    entries = [_entry(to[name], tensor) for name, tensor in tensors.items()]
    infos = [Info(e.place.file, tuple(e.tensor.shape), e.kind, e.nbytes) for e in entries]
    data = map(_bytes, watched(entries, list(tensors), progress, "write"))
    write_whole(Path(path), dict(metadata or {}), infos, data)


class Info(NamedTuple):
    """What a file says of a tensor."""

    name: str
    #: in elements
    shape: tuple[int, ...]
    #: GGUF type
    kind: str
    nbytes: int


def write_whole(
    target: Path, metadata: dict[str, Any], infos: Iterable[Info], data: Iterable[Tensor]
) -> None:
    """Write a file, which replaces one of that name when it is complete.

    Args:
        target: the file.
        metadata: by key.
        infos: of the tensors, in order.
        data: their bytes, in the same order.
    """
    gguf = gguf_package()
    writer = gguf.GGUFWriter(None, "")
    add_metadata(writer, metadata)
    for info in infos:
        kind = gguf.GGMLQuantizationType[info.kind]
        # any dtype but uint8, which would mean that the shape is in bytes
        writer.add_tensor_info(info.name, info.shape, None, info.nbytes, kind)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for each in data:
            writer.write_tensor_data(each.numpy())
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        file.flush()
        os.fsync(file.fileno())
        writer.close()
        os.replace(unfinished, target)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)


def _entry(place: Place, tensor: Tensor) -> Entry:
    """What is to be written of a tensor.

    Raises:
        CheckpointError: GGUF cannot hold it, or ggml not read it.
    """
    name, size = place.file, len(place.file.encode())
    if not 0 < size <= _NAME_BYTES:
        raise CheckpointError(f"{name!r} has {size} bytes; names in GGUF have 1 to {_NAME_BYTES}")
    if not 0 < tensor.dim() <= _DIMS:
        raise CheckpointError(
            f"{name} has {tensor.dim()} dimensions; tensors in GGUF have 1 to {_DIMS}"
        )
    if tensor.is_meta:
        raise CheckpointError(
            f"{name} is on the meta device and has no values; load its weights first"
        )
    if isinstance(tensor, QTensor):
        return _quantized(place, tensor)
    if place.added:
        tensor = tensor.detach().float() + place.added
    kind = next((kind for kind, dtype in DENSE.items() if dtype == tensor.dtype), None)
    if kind is None or type(tensor) not in (Tensor, nn.Parameter):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__} of {tensor.dtype}; GGUF holds plain tensors of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DENSE.values())}"
        )
    return Entry(place, tensor, kind, tensor.numel() * tensor.element_size())


def _quantized(place: Place, tensor: QTensor) -> Entry:
    name, kind = place.file, kind_of(tensor)
    if kind is None or tensor.is_permuted:
        raise CheckpointError(
            f"{name} is stored as {tensor.spec}{' and transposed' if tensor.is_permuted else ''}, which no "
            f"GGUF type is; quantize with GGUFWeightOnlyConfig ({', '.join(GGUF_TYPES)}), or write "
            "dequantize() of it"
        )
    (elements, size), k = block_size(kind), tensor.shape[-1]
    if k % elements:
        low, high = k // elements * elements, -(-k // elements) * elements
        sizes = f"{low} or {high}" if low else f"{high}"
        raise CheckpointError(
            f"{name} has rows of {k}, and {kind} in GGUF has blocks of {elements}: {sizes} would do; or "
            "take a type with blocks of 32, or write dequantize() of it"
        )
    return Entry(place, tensor, kind.upper(), tensor.numel() // elements * size)


def _bytes(entry: Entry) -> Tensor:
    tensor = entry.tensor.detach()
    if isinstance(tensor, QTensor):
        tensor = to_blocks(tensor, entry.kind.lower())
    return entry.place.write(tensor.cpu()).contiguous().reshape(-1).view(torch.uint8)
