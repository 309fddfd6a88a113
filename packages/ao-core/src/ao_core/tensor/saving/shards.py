"""One safetensors file: written and synced, opened, read tensor by tensor."""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from ao_core.errors import CheckpointError
from ao_core.regular_files import not_a_file
from ao_core.schema import SHAPE, TEXT, SchemaError, check, parse_json
from ao_core.tensor.saving.header import Form, Header, parse_header
from ao_core.tensor.saving.leaves import dtype_name

__all__ = [
    "Place",
    "Shard",
    "Slot",
    "checksum",
    "file_header",
    "form_crc",
    "memory_of",
    "open_shard",
    "places_of",
    "restore",
    "store",
    "write_file",
    "write_shard",
]

#: by their code in a file; what is not here is stored as bytes: complex128, which the format lacks,
#: and float4_e2m1fn_x2, which safetensors 0.8 only reads from mapped memory
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class Slot:
    """A plain tensor in an open file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    crc32: str | None
    file: Any

    def read(self, device: torch.device | str = "cpu", *, verify: bool = True) -> Tensor:
        """The tensor, in memory of its own.

        Raises:
            CheckpointError: the file cannot be read any more, or these are not the bytes written.
        """
        try:
            stored = self.file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}: {self.name!r} cannot be read: {error}") from error
        if verify and self.crc32 not in (None, checksum(stored)):
            raise CheckpointError(f"{self.path}: corrupted, the checksum of {self.name!r} is wrong")
        try:
            return restore(stored, (self.dtype, self.shape)).to(device)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {self.name!r} {error}") from error


@dataclass(frozen=True)
class Shard:
    """What an open file holds."""

    path: Path
    header: Header
    slots: dict[str, Slot]


def store(leaves: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Form]]:
    """Plain tensors as a file can hold them, and the forms of those that had to become bytes."""
    stored = {name: t.resolve_conj().resolve_neg().contiguous() for name, t in leaves.items()}
    raw = {n: (t.dtype, tuple(t.shape)) for n, t in stored.items() if t.dtype not in _CODES}
    return stored | {name: stored[name].reshape(-1).view(torch.uint8) for name in raw}, raw


def restore(stored: Tensor, form: Form) -> Tensor:
    """A stored tensor in the dtype and shape that it had.

    Raises:
        CheckpointError: it has too many or few bytes, or such a tensor is not stored as bytes.
    """
    dtype, shape = form
    if (stored.dtype, tuple(stored.shape)) == form:
        return stored
    bytes_ = stored.dtype == torch.uint8 and stored.dim() == 1 and dtype not in _CODES
    if not bytes_ or prod(shape) * dtype.itemsize != stored.numel():
        raise CheckpointError(
            f"is {dtype_name(stored.dtype)} of shape {tuple(stored.shape)}, and these are no bytes of "
            f"{dtype_name(dtype)} {shape}"
        )
    try:
        return stored.view(dtype).reshape(shape)
    except RuntimeError as error:
        raise CheckpointError(f"cannot be {dtype_name(dtype)}: {error}") from error


def checksum(tensor: Tensor) -> str:
    """CRC-32 of dtype, shape and values of a contiguous tensor on the CPU."""
    crc = zlib.crc32(memory_of(tensor), form_crc((tensor.dtype, tuple(tensor.shape))))
    return f"{crc:08x}"


def form_crc(form: Form) -> int:
    """What the CRC-32 of a tensor's bytes goes on from."""
    dtype, shape = form
    return zlib.crc32(f"{dtype_name(dtype)}{list(shape)}".encode())


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    if not tensor.nbytes:
        return b""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


def file_header(
    forms: Mapping[str, Form], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[str, ...]]:
    """The bytes that a safetensors file begins with, and its tensors in the order of their bytes.

    Equal contents give equal bytes, which the safetensors package does not promise: larger elements
    come first, as it wants them, then by name.
    """
    order = tuple(sorted(forms, key=lambda name: (-forms[name][0].itemsize, name)))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        dtype, shape = forms[name]
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write_file(path: Path, buffers: Iterable[Any]) -> None:
    """Write and sync a new file of some buffers.

    Raises:
        OSError: it cannot be written, or is there already.
    """
    with path.open("xb") as file:
        for buffer in buffers:
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())


def write_shard(path: Path, stored: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write and sync one new file of contiguous tensors on the CPU.

    Raises:
        OSError: it cannot be written.
    """
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    header, order = file_header(forms, metadata)
    write_file(path, [header, *(memory_of(stored[name]) for name in order)])


class Place(NamedTuple):
    """Where a tensor is in a file, as its header says."""

    #: code of safetensors
    dtype: str
    shape: tuple[int, ...]
    #: first byte in the file, and the first one after it
    start: int
    end: int


def places_of(path: Path) -> tuple[dict[str, str], dict[str, Place]]:
    """The metadata of a file, and where its tensors are; it was opened before, and so is one of safetensors.

    Raises:
        OSError: it cannot be read.
        SchemaError: its header is no JSON any more.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        table: dict[str, Any] = parse_json(file.read(size))
    metadata = table.pop("__metadata__", {})
    return metadata, {
        name: Place(
            told["dtype"], tuple(told["shape"]), *(8 + size + n for n in told["data_offsets"])
        )
        for name, told in table.items()
    }


def open_shard(path: Path) -> Shard:
    """Open a file and read its header.

    Raises:
        CheckpointError: it cannot be read, is a pickle, truncated, corrupted or too new.
    """
    if reason := not_a_file(path):
        raise CheckpointError(f"{path}: {reason}")
    try:
        # mapped memory would change with the file, and count as a second copy of what is read
        file: Any = safetensors.safe_open(path, "pt", backend="pread")
        header = parse_header(file.metadata() or {})
        slots = {name: _slot(path, file, header, name) for name in file.offset_keys()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {_what_else(path, error)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Shard(path, header, slots)


def _slot(path: Path, file: Any, header: Header, name: str) -> Slot:
    view = file.get_slice(name)
    code, shape = view.get_dtype(), tuple(view.get_shape())
    if code not in _DTYPES:
        raise CheckpointError(f"{name!r} is of dtype {code}, which cannot be read")
    try:
        check(name, TEXT, "a name")
        check(shape, SHAPE, "shape")
    except SchemaError as error:
        raise CheckpointError(f"{name!r}: {error}") from error
    nbytes = prod(shape) * _DTYPES[code].itemsize
    dtype, shape = header.raw.get(name, (_DTYPES[code], shape))
    if prod(shape) * dtype.itemsize != nbytes:
        raise CheckpointError(f"{name!r} has {nbytes} bytes, too many or few for {dtype} {shape}")
    return Slot(path, name, dtype, shape, nbytes, header.crcs.get(name), file)


def _what_else(path: Path, error: SafetensorError) -> str:
    """What a file is that the safetensors package does not open."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError:  # it has gone
        start = b""
    if start.startswith(_PICKLES):
        return (
            "this is a pickle, as torch.save writes it, and not a safetensors file. A pickle can run "
            "code when it is loaded, so ao loads none; convert it to safetensors first"
        )
    reason = str(error).removeprefix("Error while deserializing header: ")
    return f"truncated, corrupted or not a safetensors file: {reason}"
