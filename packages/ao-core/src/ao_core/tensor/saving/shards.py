"""One safetensors file: written and synced, opened, read tensor by tensor."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError, TensorSpec
from torch import Tensor

from ao_core.errors import CheckpointError
from ao_core.tensor.saving.header import Form, Header, parse_header
from ao_core.tensor.saving.leaves import dtype_name

__all__ = ["Shard", "Slot", "checksum", "open_shard", "restore", "store", "write_shard"]

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
_STORABLE = frozenset(_DTYPES.values())
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
        return restore(stored, (self.dtype, self.shape)).to(device)


@dataclass(frozen=True)
class Shard:
    """What an open file holds."""

    path: Path
    header: Header
    slots: dict[str, Slot]


def store(leaves: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Form]]:
    """Plain tensors as a file can hold them, and the forms of those that had to become bytes."""
    stored = {name: t.resolve_conj().resolve_neg().contiguous() for name, t in leaves.items()}
    raw = {n: (t.dtype, tuple(t.shape)) for n, t in stored.items() if t.dtype not in _STORABLE}
    return stored | {name: stored[name].reshape(-1).view(torch.uint8) for name in raw}, raw


def restore(stored: Tensor, form: Form) -> Tensor:
    """A stored tensor in the dtype and shape that it had."""
    dtype, shape = form
    return stored.reshape(-1).view(dtype).reshape(shape)


def checksum(tensor: Tensor) -> str:
    """CRC-32 of dtype, shape and values of a contiguous tensor on the CPU."""
    crc = zlib.crc32(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    if tensor.nbytes:
        crc = zlib.crc32((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()), crc)
    return f"{crc:08x}"


def write_shard(path: Path, stored: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write and sync one file of contiguous tensors on the CPU.

    Raises:
        OSError: it cannot be written.
    """
    specs = {
        name: TensorSpec(
            dtype=dtype_name(tensor.dtype),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in stored.items()
    }
    try:
        safetensors.serialize_file(specs, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error).rpartition("I/O error: ")[2]) from error
    # safetensors 0.8 lets only the owner read it; the directory has what the umask grants
    path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def open_shard(path: Path) -> Shard:
    """Open a file and read its header.

    Raises:
        CheckpointError: it cannot be read, is a pickle, truncated, corrupted or too new.
    """
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
    nbytes = prod(shape) * _DTYPES[code].itemsize
    dtype, shape = header.raw.get(name, (_DTYPES[code], shape))
    if prod(shape) * dtype.itemsize != nbytes:
        raise CheckpointError(f"{name!r} has {nbytes} bytes, too many or few for {dtype} {shape}")
    return Slot(path, name, dtype, shape, nbytes, header.crcs.get(name), file)


def _what_else(path: Path, error: SafetensorError) -> str:
    """What a file is that the safetensors package does not open."""
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(_PICKLES):
        return (
            "this is a pickle, as torch.save writes it, and not a safetensors file. A pickle can run "
            "code when it is loaded, so ao loads none; convert it to safetensors first"
        )
    reason = str(error).removeprefix("Error while deserializing header: ")
    return f"truncated, corrupted or not a safetensors file: {reason}"
