"""Files in the safetensors format, written tensor by tensor and read into memory of their own.

The format is 8 bytes of header length, a JSON header, and the tensors without gaps. It is read and
written here, rather than by the safetensors package, because a shard must be written without being
collected in memory first, synced to disk, and have checksums that are checked when it is read.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from ao_core.errors import CheckpointError

__all__ = [
    "Form",
    "Shard",
    "Slot",
    "read_shard",
    "read_tensor",
    "restore",
    "store",
    "stored_form",
    "write_shard",
]

#: dtype and shape of a plain tensor
Form = tuple[torch.dtype, tuple[int, ...]]

#: what every version of the format has; other dtypes are stored as bytes
_WRITTEN = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_READ = {code: dtype for dtype, code in _WRITTEN.items()} | {
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
#: the checksum of the header stands first in it, so that its place is known
_START = b'{"__metadata__":{"ao_crc32":"'
_NO_CRC = "0" * 8
_PICKLE_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 22


class Slot(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: first byte, from the start of the file
    start: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """The header of one file."""

    path: Path
    slots: dict[str, Slot]
    metadata: dict[str, str]
    #: of the whole header, and with it of the checksums that the header holds
    crc32: str


def stored_form(dtype: torch.dtype, shape: tuple[int, ...]) -> Form:
    """The dtype and shape in which a tensor is stored: its own, or plain bytes."""
    if dtype in _WRITTEN:
        return dtype, shape
    return torch.uint8, shape if dtype.itemsize == 1 else (prod(shape) * dtype.itemsize,)


def store(tensor: Tensor) -> Tensor:
    """A plain tensor in its `stored_form`."""
    form = (tensor.dtype, tuple(tensor.shape))
    stored = stored_form(*form)
    if stored == form:
        return tensor.contiguous()
    return tensor.contiguous().reshape(-1).view(stored[0]).reshape(stored[1])


def restore(stored: Tensor, form: Form | None) -> Tensor:
    """Inverse of `store`; without a form, the tensor is stored as it is."""
    if form is None:
        return stored
    return stored.reshape(-1).view(form[0]).reshape(form[1])


def write_shard(
    path: Path,
    forms: dict[str, Form],
    fetch: Callable[[str], Tensor],
    metadata: Callable[[dict[str, str]], dict[str, str]],
) -> str:
    """Write and sync one file; returns the checksum of its header.

    Args:
        path: a file that does not exist.
        forms: dtype and shape of each tensor, before `stored_form`.
        fetch: the tensor of a name; called once for each, and let go of before the next.
        metadata: checksums by tensor name -> metadata; its length must not depend on them.
    """
    # large elements first keeps all of them aligned
    names = sorted(forms, key=lambda name: (-stored_form(*forms[name])[0].itemsize, name))
    tensors: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = stored_form(*forms[name])
        begin, end = end, end + prod(shape) * dtype.itemsize
        tensors[name] = {
            "dtype": _WRITTEN[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }

    def header(crcs: dict[str, str], crc: str) -> bytes:
        full = {"__metadata__": {"ao_crc32": crc, **metadata(crcs)}, **tensors}
        raw = json.dumps(full, separators=(",", ":")).encode()
        return raw + b" " * (-len(raw) % 8)

    crcs = dict.fromkeys(names, _NO_CRC)
    size = len(header(crcs, _NO_CRC))
    with path.open("xb") as file:
        file.seek(8 + size)
        for name in names:
            crcs[name] = _write_bytes(file, fetch(name))
        crc = _hex(zlib.crc32(header(crcs, _NO_CRC)))
        file.seek(0)
        file.write(size.to_bytes(8, "little") + header(crcs, crc))
        file.flush()
        os.fsync(file.fileno())
    return crc


def read_shard(path: Path) -> Shard:
    """Read and check the header of a file.

    Raises:
        CheckpointError: it cannot be read, is a pickle, is truncated or corrupted.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            start = file.read(9)
            size = int.from_bytes(start[:8], "little")
            if start[8:] != b"{" or size > min(_MAX_HEADER, total - 8):
                raise CheckpointError(f"{path}: {_what_else(start, size, total)}")
            raw = start[8:] + file.read(size - 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        slots = {name: _slot(path, 8 + size, entry) for name, entry in header.items()}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata must be text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupted, its header does not parse: {error}") from error
    blank = raw[: len(_START)] + _NO_CRC.encode() + raw[len(_START) + len(_NO_CRC) :]
    crc = _hex(zlib.crc32(blank))
    if "ao_crc32" in metadata and (not raw.startswith(_START) or metadata["ao_crc32"] != crc):
        raise CheckpointError(f"{path}: corrupted, the checksum of its header is wrong")
    end = 8 + size
    for slot in sorted(slots.values(), key=lambda slot: (slot.start, slot.nbytes)):
        if slot.start != end:
            raise CheckpointError(f"{path}: corrupted, its tensors overlap or leave gaps")
        end += slot.nbytes
    if end != total:
        state = "truncated" if total < end else "corrupted"
        raise CheckpointError(f"{path}: {state}, it has {total} bytes and should have {end}")
    return Shard(path, slots, metadata, crc)


def read_tensor(slot: Slot, crc32: str | None = None) -> Tensor:
    """Read one tensor into memory of its own; with `crc32`, check that it is what was written."""
    tensor = torch.empty(slot.shape, dtype=slot.dtype)
    view, crc = _bytes_of(tensor), 0
    try:
        with slot.path.open("rb") as file:
            file.seek(slot.start)
            for begin in range(0, slot.nbytes, _CHUNK):
                chunk = view[begin : begin + _CHUNK]
                if file.readinto(chunk) != len(chunk):
                    raise CheckpointError(f"{slot.path}: truncated while it was being read")
                if crc32 is not None:
                    crc = zlib.crc32(chunk, crc)
    except OSError as error:
        raise CheckpointError(f"{slot.path}: cannot be read: {error.strerror or error}") from error
    if crc32 is not None and _hex(crc) != crc32:
        raise CheckpointError(
            f"{slot.path}: corrupted, the checksum of bytes {slot.start} to "
            f"{slot.start + slot.nbytes} is wrong"
        )
    return tensor


def _write_bytes(file: IO[bytes], tensor: Tensor) -> str:
    tensor = tensor.detach().contiguous().cpu()
    view, crc = _bytes_of(tensor), 0
    for begin in range(0, len(view), _CHUNK):
        chunk = view[begin : begin + _CHUNK]
        crc = zlib.crc32(chunk, crc)
        file.write(chunk)
    return _hex(crc)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, which must outlive the view."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _slot(path: Path, data: int, entry: dict[str, Any]) -> Slot:
    if entry["dtype"] not in _READ:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    dtype, shape, (begin, end) = _READ[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not _natural([*shape, begin, end]) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"{entry} is not consistent")
    return Slot(path, dtype, tuple(shape), data + begin, end - begin)


def _natural(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _what_else(start: bytes, size: int, total: int) -> str:
    """What a file is that does not begin like a safetensors file."""
    if start[8:] == b"{" and size <= _MAX_HEADER:
        return f"truncated, it has {total} bytes and its header alone should have {size}"
    if start[:4] == b"PK\x03\x04" or start.startswith(_PICKLE_PROTOCOLS):
        return (
            "this is a pickle, as torch.save writes it, and not a safetensors file. A pickle can run "
            "code when it is loaded, so ao loads none; convert it to safetensors first"
        )
    return "not a safetensors file, or its first bytes are corrupted"
