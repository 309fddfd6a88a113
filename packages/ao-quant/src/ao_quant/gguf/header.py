"""The header of a GGUF file, which may be anybody's: every number is checked before it is believed.

The reader of the `gguf` package begins to read 2**60 items where a header says so, and makes an array of each
token of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from ao_core.ext import CheckpointError
from ao_core.ext.saving import not_a_file
from ao_core.ext.schema import SHAPE, SchemaError, check

__all__ = ["Entry", "Header", "read_header"]

#: type of a value -> that of numpy
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
#: dimensions of a tensor, at most; versions of the format that are read
_DIMENSIONS, _VERSIONS = 8, (2, 3)
#: key of the multiple at which tensors begin, and what it is where a file does not say
_ALIGNMENT, _ALIGNED = "general.alignment", 32


class Entry(NamedTuple):
    """What a header says of a tensor."""

    name: str
    #: number of ggml's type
    kind: int
    #: in torch's order
    shape: tuple[int, ...]
    #: byte in the file
    start: int


class Header(NamedTuple):
    """All that is before the tensors."""

    #: str, bool, numpy scalar, list of str or numpy array, by key and in order
    metadata: dict[str, Any]
    entries: list[Entry]


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        CheckpointError: it contradicts itself, says more than the file has, or holds arrays of arrays; or the
            file is missing, a pipe, a device or the like.
    """
    if reason := not_a_file(path):
        raise CheckpointError(f"{path}: {reason}")
    with path.open("rb") as file:
        start = file.read(24)
        if start[:4] != b"GGUF" or len(start) < 24:
            raise CheckpointError(
                f"{path} is not a GGUF file, or it is damaged: the magic is wrong"
            )
        version, tensors, keys = struct.unpack("<IQQ", start[4:])
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{path}: only little-endian files are supported")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                if version not in _VERSIONS:
                    raise SchemaError(f"version {version} is none of {_VERSIONS}")
                return _Walk(data).header(tensors, keys)
            except SchemaError as error:
                raise CheckpointError(
                    f"{path} is not a GGUF file, or it is damaged: {error}"
                ) from error


class _Walk:
    """A place in the header, which goes on over what is there."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 24

    def header(self, tensors: int, keys: int) -> Header:
        """Read all keys and the description of each tensor."""
        metadata: dict[str, Any] = {}
        for i in range(keys):
            name = self.text(f"the name of key {i}")
            if name in metadata:
                raise SchemaError(f"the key {name!r} is there twice")
            metadata[name] = self.value(self.number("<I", f"the type of {name!r}"), repr(name)[:80])
        entries = [self.entry(i) for i in range(tensors)]
        if len({entry.name for entry in entries}) < len(entries):
            raise SchemaError("two tensors have the same name")
        aligned = int(metadata.get(_ALIGNMENT, _ALIGNED))
        if aligned < 1 or any(entry.start % aligned for entry in entries):
            raise SchemaError(f"a tensor does not begin at a multiple of {aligned}")
        first = -(-self.at // aligned) * aligned
        return Header(metadata, [e._replace(start=first + e.start) for e in entries])

    def entry(self, i: int) -> Entry:
        """Read the description of a tensor, whose start counts from the first one's."""
        name = self.text(f"the name of tensor {i}")
        count = self.number("<I", f"dimensions of {name!r}")
        if not 1 <= count <= _DIMENSIONS:
            raise SchemaError(f"{name!r} has {count} dimensions, and 1 to {_DIMENSIONS} can be")
        shape = [self.number("<Q", f"shape of {name!r}") for _ in range(count)]
        check(shape, SHAPE, f"shape of {name!r}")
        kind = self.number("<I", f"type of {name!r}")
        return Entry(name, kind, tuple(shape[::-1]), self.number("<Q", f"place of {name!r}"))

    def value(self, kind: int, name: str) -> Any:
        """Read a value of a type."""
        if kind == _STRING:
            return self.text(name)
        if kind == _ARRAY:
            inner, count = self.number("<I", name), self.number("<Q", name)
            if inner == _ARRAY:
                raise SchemaError(f"{name} is an array of arrays, which is not supported")
            if inner == _STRING:
                self.room(8 * count, name)
                return [self.text(name) for _ in range(count)]
            return self.numbers(inner, count, name)
        value = self.numbers(kind, 1, name)[0]
        return bool(value) if kind == _BOOL else value

    def numbers(self, kind: int, count: int, name: str) -> Any:
        """Read numbers of a type, as an array of numpy."""
        import numpy

        if kind not in _NUMBERS:
            raise SchemaError(f"{name} is of type {kind}, and there is none")
        dtype = numpy.dtype(_NUMBERS[kind])
        start = self.skip(dtype.itemsize * count, name)
        return numpy.frombuffer(self.data[start : self.at], dtype).copy()

    def text(self, what: str) -> str:
        """Read a text, which must be UTF-8."""
        start = self.skip(self.number("<Q", what), what)
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise SchemaError(f"{what} is not a text in UTF-8: {error}") from error

    def number(self, kind: str, what: str) -> int:
        """Read a number of a format of `struct`."""
        start = self.skip(struct.calcsize(kind), what)
        value: int = struct.unpack_from(kind, self.data, start)[0]
        return value

    def skip(self, size: int, what: str) -> int:
        """Go on by so many bytes, which must be there; returns where they begin."""
        self.room(size, what)
        start, self.at = self.at, self.at + size
        return start

    def room(self, size: int, what: str) -> None:
        """Raise `SchemaError` where there are not so many bytes."""
        if size > len(self.data) - self.at:
            raise SchemaError(f"{what} ends behind the end of the file")
